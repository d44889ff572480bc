package show

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/live/api"
)

// Tcpdump writes connections as an expression of pcap-filter(7), which matches the packets
// between client and proxy, and between proxy and endpoint.
type Tcpdump struct {
	out    io.Writer
	before string
}

// NewTcpdump returns an expression without connections.
func NewTcpdump(out io.Writer) *Tcpdump { return &Tcpdump{out: out} }

// Row adds a connection.
func (t *Tcpdump) Row(c *api.Connection) error {
	legs := [][2]string{{cmp.Or(c.Via, c.Client), c.VIP}}
	if onward := [2]string{c.SourceAddr, c.Endpoint}; c.Endpoint != "" && onward != legs[0] {
		legs = append(legs, onward)
	}
	for _, leg := range legs {
		from, err := netip.ParseAddrPort(leg[0])
		if err != nil {
			continue // the source is not known yet
		}
		to, err := netip.ParseAddrPort(leg[1])
		if err != nil {
			continue
		}
		if _, err := fmt.Fprintf(t.out, "%s(%s and host %s and port %d and host %s and port %d)", t.before,
			strings.ToLower(c.Protocol), from.Addr(), from.Port(), to.Addr(), to.Port()); err != nil {
			return err
		}
		t.before = " or\n"
	}
	return nil
}

// Flush ends the expression.
func (t *Tcpdump) Flush() error {
	if t.before == "" {
		return nil
	}
	_, err := fmt.Fprintln(t.out)
	return err
}
