package dns

import (
	"errors"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	// plainSize is what a client without EDNS takes over UDP, and the least that one with it
	// does (RFC 6891).
	plainSize = 512
	// mostSize bounds answers over UDP, so that no packet is fragmented on the way.
	mostSize = 1232
	// tcpSize bounds answers over TCP.
	tcpSize = 65535

	// What dnsmessage has no names for.
	typeIXFR       = dnsmessage.Type(251)
	rcodeBadVers   = 16
	ednsVersionBit = 16
)

// query is a parsed question of a client.
type query struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	edns     bool
	version  byte // of EDNS
	size     int  // of the answer, over UDP
}

// parse reads a client's message. It reports false for one that gets no answer: what is
// not DNS, or is an answer itself. code says why a message is not understood.
func parse(message []byte) (q query, code dnsmessage.RCode, ok bool) {
	var p dnsmessage.Parser
	var err error
	q.size = plainSize
	if q.header, err = p.Start(message); err != nil || q.header.Response {
		return q, 0, false
	}
	if q.header.OpCode != 0 {
		return q, dnsmessage.RCodeNotImplemented, true
	}
	question, err := p.Question()
	if err != nil || !errors.Is(p.SkipQuestion(), dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true // none, or several
	}
	q.question = question
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return q, dnsmessage.RCodeFormatError, true
	}
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return q, dnsmessage.RCodeSuccess, true
		}
		if err != nil {
			return q, dnsmessage.RCodeFormatError, true
		}
		if h.Type == dnsmessage.TypeOPT {
			if q.edns {
				return q, dnsmessage.RCodeFormatError, true // a second one (RFC 6891)
			}
			q.edns, q.version = true, byte(h.TTL>>ednsVersionBit)
			q.size = min(max(int(h.Class), plainSize), mostSize)
		}
		if p.SkipAdditional() != nil {
			return q, dnsmessage.RCodeFormatError, true
		}
	}
}

// reply packs an answer in at most size bytes. What does not fit is left out: additional
// records first, then records, which the header says. recursion says that other names
// are forwarded.
func (q *query) reply(a *answer, soa func() record, recursion bool, size int) ([]byte, error) {
	m := message{
		header: dnsmessage.Header{
			ID: q.header.ID, Response: true, OpCode: q.header.OpCode, RecursionDesired: q.header.RecursionDesired,
			Authoritative: a.ours, RecursionAvailable: recursion, RCode: a.code & 0xf,
		},
		answers: a.records, additional: a.extra,
	}
	if a.ours && a.alias == "" && (a.code == dnsmessage.RCodeNameError || a.code == dnsmessage.RCodeSuccess && !ends(a.records, q.question.Type)) {
		m.authorities = []record{soa()}
	}
	if most := size / leastRecord; len(m.answers) > most { // no need to pack them
		m.answers, m.header.Truncated, m.additional = m.answers[:most], true, nil
	}
	for {
		packed, err := m.pack(q, a.code)
		if err == nil && len(packed) <= size {
			return packed, nil
		}
		switch n := len(m.answers); {
		case len(m.additional) > 0:
			m.additional = nil
		case n > 0:
			m.answers, m.header.Truncated = m.answers[:n*3/4], true
		case m.authorities != nil:
			m.authorities = nil
		default:
			return nil, err
		}
	}
}

// message is a reply before it is packed.
type message struct {
	header                           dnsmessage.Header
	answers, authorities, additional []record
}

// pack packs m as the reply to q. A code that the header has no room for goes into EDNS.
func (m *message) pack(q *query, code dnsmessage.RCode) ([]byte, error) {
	b := dnsmessage.NewBuilder(make([]byte, 0, plainSize), m.header)
	b.EnableCompression()
	err := b.StartQuestions()
	if q.question.Name.Length > 0 && err == nil {
		err = b.Question(q.question)
	}
	add := func(records []record) {
		for i := range records {
			if err == nil {
				err = records[i].pack(&b)
			}
		}
	}
	err = errors.Join(err, b.StartAnswers())
	add(m.answers)
	err = errors.Join(err, b.StartAuthorities())
	add(m.authorities)
	err = errors.Join(err, b.StartAdditionals())
	if q.edns {
		var h dnsmessage.ResourceHeader
		err = errors.Join(err, h.SetEDNS0(mostSize, code, false))
		err = errors.Join(err, b.UnknownResource(h, dnsmessage.UnknownResource{Type: dnsmessage.TypeOPT}))
	}
	add(m.additional)
	if err != nil {
		return nil, err
	}
	return b.Finish()
}

// leastRecord is the size of the smallest record: a pointer to its name, and its header.
const leastRecord = 12

// ends reports whether records answer a question for a type, and do not only lead to a
// name that has none.
func ends(records []record, t dnsmessage.Type) bool {
	if len(records) == 0 {
		return false
	}
	if t == dnsmessage.TypeCNAME || t == dnsmessage.TypeALL {
		return true
	}
	return records[len(records)-1].kind != dnsmessage.TypeCNAME
}
