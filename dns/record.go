package dns

import (
	"encoding/binary"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// record is a resource record of an answer.
type record struct {
	name string // with the final dot
	kind dnsmessage.Type
	ttl  uint32 // seconds
	data []byte // as it is sent; names in it are not compressed
}

// pack adds r to a message. It fails for a name that is too long.
func (r *record) pack(b *dnsmessage.Builder) error {
	name, err := dnsmessage.NewName(r.name)
	if err != nil {
		return err
	}
	h := dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: r.ttl}
	return b.UnknownResource(h, dnsmessage.UnknownResource{Type: r.kind, Data: r.data})
}

// validName reports whether s, which ends with a dot, and its labels are not too long or
// empty (RFC 1035, 2.3.4).
func validName(s string) bool {
	if len(s) > 254 || !strings.HasSuffix(s, ".") {
		return false
	}
	for label := range strings.SplitSeq(s[:len(s)-1], ".") {
		if label == "" && s != "." || len(label) > 63 {
			return false
		}
	}
	return true
}

// appendName adds a valid name to the data of a record.
func appendName(data []byte, name string) []byte {
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		if label != "" {
			data = append(append(data, byte(len(label))), label...)
		}
	}
	return append(data, 0)
}

// readRecord reads the next answer of a resolver. A SOA, which nobody asks an alias for, has
// no data then.
func readRecord(p *dnsmessage.Parser) (r record, err error) {
	h, err := p.AnswerHeader()
	if err != nil {
		return r, err
	}
	r = record{name: h.Name.String(), kind: h.Type, ttl: h.TTL}
	// Names in the data of these types may be compressed (RFC 3597, 4).
	switch h.Type {
	case dnsmessage.TypeCNAME:
		body, failed := p.CNAMEResource()
		r.data, err = appendName(nil, body.CNAME.String()), failed
	case dnsmessage.TypeNS:
		body, failed := p.NSResource()
		r.data, err = appendName(nil, body.NS.String()), failed
	case dnsmessage.TypePTR:
		body, failed := p.PTRResource()
		r.data, err = appendName(nil, body.PTR.String()), failed
	case dnsmessage.TypeMX:
		body, failed := p.MXResource()
		r.data, err = appendName(binary.BigEndian.AppendUint16(nil, body.Pref), body.MX.String()), failed
	case dnsmessage.TypeSRV:
		body, failed := p.SRVResource()
		for _, n := range [...]uint16{body.Priority, body.Weight, body.Port} {
			r.data = binary.BigEndian.AppendUint16(r.data, n)
		}
		r.data, err = appendName(r.data, body.Target.String()), failed
	case dnsmessage.TypeSOA:
		err = p.SkipAnswer()
	default:
		body, failed := p.UnknownResource()
		r.data, err = body.Data, failed
	}
	return r, err
}
