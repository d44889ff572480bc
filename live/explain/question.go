// Package explain reports decisions as text and JSON: it asks the [policy.Table] that
// also serves connections, and sends no packet.
package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"sigs.k8s.io/json"

	"github.com/sluice-proxy/sluice/service"
)

// Question is a connection that a client may make.
type Question struct {
	Protocol service.Protocol
	From     netip.Addr
	To       netip.AddrPort
}

// ParseQuestion reads a question. An empty protocol means tcp. IPv4-mapped IPv6
// addresses count as IPv4.
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

// parseLine reads a line of JSON. A field that is not known, or is there twice, is
// an error: it is more likely a typing error than something to pass over.
func parseLine(line []byte) (Question, error) {
	var l questionLine
	strict, err := json.UnmarshalStrict(line, &l)
	if err == nil && len(strict) > 0 {
		err = strict[0]
	}
	if err != nil {
		return Question{}, fmt.Errorf("not a question such as %s: %s", example, strings.TrimPrefix(err.Error(), "json: "))
	}
	return ParseQuestion(l.Protocol, l.From, l.To)
}

const example = `{"protocol":"tcp","from":"10.244.0.5","to":"10.96.0.10:80"}`
