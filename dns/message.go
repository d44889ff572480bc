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
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		return q, dnsmessage.RCodeFormatError, true
	}
	q.question = questions[0]
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
func (q *query) reply(a *answer, soa func() dnsmessage.Resource, recursion bool, size int) ([]byte, error) {
	m := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: q.header.ID, Response: true, OpCode: q.header.OpCode, RecursionDesired: q.header.RecursionDesired,
			Authoritative: a.ours, RecursionAvailable: recursion, RCode: a.code & 0xf,
		},
		Answers: a.records,
	}
	if q.question.Name.Length > 0 {
		m.Questions = []dnsmessage.Question{q.question}
	}
	if a.ours && a.alias == "" && (a.code == dnsmessage.RCodeNameError || a.code == dnsmessage.RCodeSuccess && !ends(a.records, q.question.Type)) {
		m.Authorities = []dnsmessage.Resource{soa()}
	}
	extra := a.extra
	if most := size / leastRecord; len(m.Answers) > most { // no need to pack them
		m.Answers, m.Truncated, extra = m.Answers[:most], true, nil
	}
	for {
		m.Additionals = extra
		if q.edns {
			var h dnsmessage.ResourceHeader
			if err := h.SetEDNS0(mostSize, a.code, false); err != nil {
				return nil, err
			}
			m.Additionals = append([]dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{}}}, extra...)
		}
		packed, err := m.Pack()
		if err == nil && len(packed) <= size {
			return packed, nil
		}
		switch n := len(m.Answers); {
		case len(extra) > 0:
			extra = nil
		case n > 0:
			m.Answers, m.Truncated = m.Answers[:n*3/4], true
		case m.Authorities != nil:
			m.Authorities = nil
		default:
			return nil, err
		}
	}
}

// leastRecord is the size of the smallest record: a pointer to its name, and its header.
const leastRecord = 12

// ends reports whether records answer a question for a type, and do not only lead to a
// name that has none.
func ends(records []dnsmessage.Resource, t dnsmessage.Type) bool {
	if len(records) == 0 {
		return false
	}
	if t == dnsmessage.TypeCNAME || t == dnsmessage.TypeALL {
		return true
	}
	_, alias := records[len(records)-1].Body.(*dnsmessage.CNAMEResource)
	return !alias
}
