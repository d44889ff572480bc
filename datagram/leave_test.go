package datagram

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// A server that leaves has no socket at its ports any more, and what endpoints still send to
// its sessions reaches the clients.
func TestSessionsGoOnAfterLeave(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	for _, family := range []struct {
		network, vip   string
		node, endpoint netip.Addr
	}{
		{"udp4", vip4, lab.Node.IPv4, lab.Backends[0].IPv4},
		{"udp6", vip6, lab.Node.IPv6, lab.Backends[0].IPv6},
	} {
		change := svc(family.network, family.vip, nil, at(family.endpoint, 5300))
		change.Services[0].Spec.Type = "NodePort"
		change.Services[0].Spec.Ports[0].NodePort = 30053
		if family.network == "udp6" {
			change.Services[0].Spec.Ports[0].NodePort = 30054
		}
		n.apply(change)
	}
	ports := map[string]netip.AddrPort{"udp4": at(lab.Node.IPv4, 30053), "udp6": at(lab.Node.IPv6, 30054)}
	type talk struct {
		name      string
		client    net.Conn
		endpoint  net.PacketConn
		answersTo net.Addr
	}
	var talks []talk
	for network, bound := range ports {
		must.OK(t, lab.Node.Do(func() error {
			return n.server.Bind(policy.Opening{Destination: service.Destination{Addr: bound.Addr(), Port: bound.Port(), Protocol: service.UDP}, Action: policy.Accept})
		}))
		endpoint := must.Get(lab.Backends[0].ListenPacket(network, ":5300"))(t)
		t.Cleanup(func() { _ = endpoint.Close() })
		_ = endpoint.SetDeadline(time.Now().Add(patience))
		vip := netip.MustParseAddr(map[string]string{"udp4": vip4, "udp6": vip6}[network])
		for _, to := range []netip.AddrPort{bound, at(vip, 53)} {
			for _, from := range []*netns.Host{lab.Client, lab.Node} {
				c := client(t, from, to.String())
				_ = c.SetDeadline(time.Now().Add(patience))
				must.OK(t, must.Err(c.Write([]byte("q"))))
				_, seen, err := endpoint.ReadFrom(make([]byte, 10))
				must.OKf(t, err, "%s to %s", from.Name(), to)
				talks = append(talks, talk{from.Name() + " to " + to.String(), c, endpoint, seen})
			}
		}
	}
	n.server.Pause()
	n.server.Leave()
	for network, bound := range ports {
		other, err := lab.Node.ListenPacket(network, bound.String())
		if err != nil {
			t.Errorf("the port is not free: %v", err)
			continue
		}
		defer other.Close()
	}
	for _, k := range talks {
		for _, answer := range []string{"one", "two"} {
			must.OK(t, must.Err(k.endpoint.WriteTo([]byte(answer), k.answersTo)))
			b := make([]byte, 10)
			if size, err := k.client.Read(b); err != nil || string(b[:size]) != answer {
				t.Errorf("%s: %q, %v, want %q", k.name, b[:size], err, answer)
			}
		}
	}
	check.Equalf(t, n.server.Stats().Sessions.Load(), int64(len(talks)), "open sessions")
}
