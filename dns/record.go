package dns

import (
	"errors"
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

// readRecord reads the next answer of a resolver's message.
func readRecord(p *dnsmessage.Parser, message []byte) (r record, err error) {
	h, err := p.AnswerHeader()
	if err != nil {
		return r, err
	}
	body, err := p.UnknownResource()
	if err != nil {
		return r, err
	}
	data, ok := decompress(message, body.Data, layout(h.Type))
	if !ok {
		return r, errData
	}
	return record{name: h.Name.String(), kind: h.Type, ttl: h.TTL, data: data}, nil
}

var errData = errors.New("a record's data are not of its type's form")

// layout returns how the data of a type begin whose names may be compressed (RFC 1035, 3.3;
// RFC 3597, 4): n is a name, s a string with its length before it, a digit so many bytes.
func layout(t dnsmessage.Type) string {
	const md, mf, mb, mg, mr, minfo, rp, afsdb, rt, sig, px, nxt, naptr, kx, dname = 3, 4, 7, 8, 9, 14, 17, 18, 21, 24, 26, 30, 35, 36, 39
	switch t {
	case dnsmessage.TypeCNAME, dnsmessage.TypeNS, dnsmessage.TypePTR, md, mf, mb, mg, mr, nxt, dname:
		return "n"
	case dnsmessage.TypeSOA, minfo, rp:
		return "nn"
	case dnsmessage.TypeMX, afsdb, rt, kx:
		return "2n"
	case px:
		return "2nn"
	case dnsmessage.TypeSRV:
		return "6n"
	case sig:
		return "99n"
	case naptr:
		return "4sssn"
	}
	return ""
}

// decompress returns a record's data with their names whole. It reports false if they are
// shorter than their layout.
func decompress(message, data []byte, layout string) (whole []byte, ok bool) {
	for _, field := range layout {
		n := int(field - '0')
		switch {
		case field == 'n':
			if whole, data, ok = decompressName(message, data, whole); !ok {
				return nil, false
			}
			continue
		case field == 's' && len(data) > 0:
			n = 1 + int(data[0])
		}
		if n > len(data) {
			return nil, false
		}
		whole, data = append(whole, data[:n]...), data[n:]
	}
	return append(whole, data...), true
}

// decompressName adds the name that data begin with to whole, and returns what follows it.
// It reports false for a name that is cut off, too long or refers to itself.
func decompressName(message, data, whole []byte) (_, rest []byte, ok bool) {
	begin, jumps := len(whole), 0
	for len(data) > 0 && len(whole)-begin < 255 {
		n := int(data[0])
		switch {
		case n < 0x40 && n < len(data): // a label
			whole, data = append(whole, data[:1+n]...), data[1+n:]
			if n > 0 {
				continue
			}
			if jumps == 0 {
				rest = data
			}
			return whole, rest, len(whole)-begin <= 255
		case n >= 0xc0 && len(data) > 1 && jumps < mostJumps: // the rest is elsewhere in the message
			if jumps++; jumps == 1 {
				rest = data[2:]
			}
			data = message[min(n&0x3f<<8|int(data[1]), len(message)):]
		default:
			return nil, nil, false
		}
	}
	return nil, nil, false
}

// mostJumps bounds the references that a name follows; dnsmessage has the same bound.
const mostJumps = 10
