package flow

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Two flows whose hops BPF knows at the same place each have their own: their datagrams come at the same
// time, and each gets to its endpoint, at another interface.
func TestFlowsHaveTheirOwnHops(t *testing.T) {
	t.Parallel()
	const apart = 256 // HOPS / 2 of maps.h
	lab := netns.NewLab(t, 2)
	s := &shortcutNet{node: newNode(t, lab, nil)}
	s.awaitShortcuts(true)
	var pairs [apart][2]net.Conn
	for i, b := range lab.Backends {
		b.EchoUDP(t, 8080)
		vip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 7, byte(i + 1)}), 80)
		s.apply(named(fmt.Sprint("of-", i), svc(vip.Addr().String(), nil, at(b.IPv4, 8080))))
		for range apart {
			c := lab.Client.Connect(t, "udp", vip.String())
			_ = c.SetDeadline(time.Now().Add(patience))
			must.OK(t, must.Err(line(c))) // opens it
			key := bpf.TupleOf(syscall.IPPROTO_UDP, c.LocalAddr().(*net.UDPAddr).AddrPort(), vip)
			pairs[s.server.kernel.Index.Find(&key).Flow()%apart][i] = c
		}
	}
	before, asked := s.server.Stats().Kernel["shortcuts"], uint64(0)
	for _, pair := range pairs {
		if pair[0] == nil || pair[1] == nil {
			continue
		}
		for range 4 { // the first one takes the IP stack after a pause
			for _, c := range pair {
				must.OK(t, must.Err(c.Write([]byte("who?\n"))))
			}
			for i, c := range pair {
				b := make([]byte, 256)
				n, err := c.Read(b)
				must.OKf(t, err, "what endpoint %d answers", i)
				if want := fmt.Sprintf("b%d", i+1); !strings.HasPrefix(string(b[:n]), want) {
					t.Fatalf("%q answered, not %s", b[:n], want)
				}
				asked++
			}
		}
	}
	if took := s.server.Stats().Kernel["shortcuts"] - before; asked < apart || took < asked {
		t.Errorf("%d of %d packets took shortcuts", took, 2*asked)
	}
}
