package flow

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// An IPv6 endpoint may say from another of its addresses that it is closed (Linux does so where the
// endpoint's address is at none of its interfaces). Its session ends, whether it was answered or not.
func TestRefusalFromAnotherAddressEndsTheSession(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		for _, answered := range []bool{false, true} {
			t.Run(fmt.Sprintf("hidden=%t/answered=%t", hidden, answered), func(t *testing.T) {
				lab := netns.NewLab(t, 2)
				lab.Settle(t)
				one := lab.Backends[0]
				anycast := netip.MustParseAddr("fd00:3::1")
				route := func(h *netns.Host, args ...string) {
					t.Helper()
					must.Run(t, h.Command(t, "ip", append([]string{"-6", "route", "add"}, args...)...))
				}
				route(one, "local", anycast.String(), "dev", "lo")
				route(lab.Node, anycast.String(), "via", one.IPv6.String())
				n := newNode(t, lab, nil)
				n.config.MasqueradeAll = hidden
				n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{1}, After: 1, Total: 1}
				n.apply(svc(vip6, nil, at(anycast, 8080)))
				var server net.PacketConn
				if answered {
					must.OK(t, one.SetSysctl("net/ipv6/ip_nonlocal_bind", "1"))
					var err error
					if server, err = one.ListenPacket("udp", at(anycast, 8080).String()); err != nil {
						t.Fatal(err)
					}
					defer server.Close()
					go echo(server)
				}
				c := lab.Client.Connect(t, "udp", net.JoinHostPort(vip6, "80"))
				if answered {
					must.OK(t, must.Err(question(c)))
					server.Close()
				}
				wait.True(t, "the session ends", func() bool {
					_, _ = c.Write([]byte("who?"))
					return len(n.taken()) > 0
				})
				want := conntrack.ConnectFailed
				if answered {
					want = conntrack.EndpointGone
				}
				check.Equalf(t, n.taken()[0].End, want, "the session's end")
			})
		}
	}
}

// echo answers datagrams until its socket is closed.
func echo(server net.PacketConn) {
	b := make([]byte, 1<<10)
	for {
		n, from, err := server.ReadFrom(b)
		if err != nil {
			return
		}
		_, _ = server.WriteTo(b[:n], from)
	}
}
