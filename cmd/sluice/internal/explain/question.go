// Package explain puts decisions into words and JSON: it asks the very
// [policy.Table] that serves connections, and sends no packet.
package explain

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// Question is a connection that a client may make.
type Question struct {
	Protocol service.Protocol
	From     netip.Addr
	To       netip.AddrPort
}

// ParseQuestion reads a question. No protocol stands for tcp. IPv4 addresses
// mapped into IPv6 are taken for what they are.
func ParseQuestion(protocol, from, to string) (Question, error) {
	var q Question
	switch {
	case protocol == "" || strings.EqualFold(protocol, "tcp"):
		q.Protocol = service.TCP
	case strings.EqualFold(protocol, "udp"):
		q.Protocol = service.UDP
	case strings.EqualFold(protocol, "sctp"):
		q.Protocol = service.SCTP
	default:
		return q, fmt.Errorf("protocol: %q is not one of tcp, udp, sctp", protocol)
	}
	if from == "" || to == "" {
		return q, errors.New("from and to are needed: the client's address, and the address and port that it connects to")
	}
	client, err := netip.ParseAddr(from)
	if err != nil || client.Zone() != "" {
		return q, fmt.Errorf("from: %q is not an IP address such as 10.244.0.5 or fd00::5", from)
	}
	dst, err := netip.ParseAddrPort(to)
	if err != nil || dst.Addr().Zone() != "" || dst.Port() == 0 {
		return q, fmt.Errorf("to: %q is not an IP address and a port such as 10.96.0.10:80 or [fd00::10]:80", to)
	}
	q.From, q.To = client.Unmap(), netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	if q.From.Is4() != q.To.Addr().Is4() {
		return q, fmt.Errorf("from %s and to %s are not of one address family", q.From, q.To)
	}
	return q, nil
}

// questionLine is a question as a line of JSON.
type questionLine struct {
	Protocol string `json:"protocol"`
	From     string `json:"from"`
	To       string `json:"to"`
}

// parseLine reads a line of JSON. A field that is not known is an error, as it
// is more likely a slip of the pen than something that may be passed over.
func parseLine(line []byte) (Question, error) {
	l, ok := plainLine(string(line))
	if !ok {
		var err error
		if l, err = anyLine(line); err != nil {
			return Question{}, err
		}
	}
	return ParseQuestion(l.Protocol, l.From, l.To)
}

// anyLine reads a question in any form that JSON allows.
func anyLine(line []byte) (questionLine, error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	var l questionLine
	if err := d.Decode(&l); err != nil {
		return l, fmt.Errorf("not a question such as %s: %s", example, strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return l, errors.New("more than one question in a line")
	}
	return l, nil
}

// plainLine reads a question in the form that programs write, several times
// faster than anyLine. Whatever it does not know it leaves to that.
func plainLine(rest string) (l questionLine, ok bool) {
	if rest, ok = strings.CutPrefix(rest, "{"); !ok {
		return l, false
	}
	for {
		var key, value string
		if key, rest, ok = plainString(rest); !ok {
			return l, false
		}
		if rest, ok = strings.CutPrefix(strings.TrimLeft(rest, " "), ":"); !ok {
			return l, false
		}
		if value, rest, ok = plainString(rest); !ok {
			return l, false
		}
		switch key {
		case "protocol":
			l.Protocol = value
		case "from":
			l.From = value
		case "to":
			l.To = value
		default:
			return l, false
		}
		rest = strings.TrimLeft(rest, " ")
		if rest == "}" {
			return l, true
		}
		if rest, ok = strings.CutPrefix(rest, ","); !ok {
			return l, false
		}
	}
}

// plainString reads a string without escapes.
func plainString(s string) (text, rest string, ok bool) {
	if s, ok = strings.CutPrefix(strings.TrimLeft(s, " "), `"`); !ok {
		return "", "", false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"':
			return s[:i], s[i+1:], true
		case c == '\\', c < ' ', c > '~':
			return "", "", false
		}
	}
	return "", "", false
}

const example = `{"protocol":"tcp","from":"10.244.0.5","to":"10.96.0.10:80"}`
