package e2e

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestPrivilegedClientsGetPrivilegedPorts connects the node itself and a masqueraded
// client, both from a privileged port, to a server that answers nobody else, as NFS and
// rsh do. A firewall drops what connection tracking does not understand, though
// connections from other ports bypass it.
func TestPrivilegedClientsGetPrivilegedPorts(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		const outsidePort, ownPort = 987, 555 // no other client of the node gets the latter
		lab := netns.NewLab(t, 1)
		lab.Node.TrackConnections(t)
		firewall := "add table inet firewall; add chain inet firewall input { type filter hook input priority 0; }; add rule inet firewall input ct state invalid drop"
		must.Run(t, lab.Node.Command(t, administration(t, "nft"), firewall))
		answerPrivileged(t, lab.Backends[0], ":8080")
		p := newProxy(t, lab.Node)
		p.mode = m
		p.put(&object{
			name: "nfs", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4, vip6}, port: 2049, target: 8080,
			endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}},
		})
		p.start("--masquerade-all", "--conntrack", "bypass", "--datapath", "relay")
		seen := map[[2]netip.AddrPort]string{} // by the client's address and the Service's
		for _, address := range addresses(2049, vip4, vip6) {
			if _, saw := from(t, lab.Client, 0, address); saw != "" {
				t.Fatalf("to %s: the server saw %s and answered: it proves nothing", address, saw)
			}
			for h, port := range map[*netns.Host]uint16{lab.Client: outsidePort, lab.Node: ownPort} {
				own, saw := from(t, h, port, address)
				seen[[2]netip.AddrPort{own, netip.MustParseAddrPort(address)}] = saw
				at, err := netip.ParseAddrPort(saw)
				if err != nil {
					t.Errorf("%s to %s: no answer", h.Name(), address)
					continue
				}
				if !slices.Contains(lab.Node.Addrs(t), at.Addr()) {
					t.Errorf("%s to %s: the server saw %s, no address of the node", h.Name(), address, at)
				}
				// The node's client occupies its own port at the node's address.
				if h == lab.Client && at.Port() != outsidePort {
					t.Errorf("%s to %s: the server saw port %d, want the client's own", h.Name(), address, at.Port())
				}
			}
		}
		p.stop()
		for _, r := range p.records() {
			if saw := seen[[2]netip.AddrPort{r.Client, r.VIP}]; saw != "" && r.SourceAddress.String() != saw {
				t.Errorf("%s to %s: the record's source_address is %s, the server saw %s", r.Client, r.VIP, r.SourceAddress, saw)
			}
		}
	})
}

// answerPrivileged runs a server that tells clients with a privileged port their address,
// and closes the connections of others.
func answerPrivileged(t *testing.T, h *netns.Host, address string) {
	t.Helper()
	l := must.Get(h.Listen("tcp", address))(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		netns.Accept(l, func(c net.Conn) {
			at := netip.MustParseAddrPort(c.RemoteAddr().String())
			if at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port()); at.Port() < 1024 {
				_, _ = io.WriteString(c, at.String())
			}
			_ = c.Close()
		})
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
}

// from connects from a port, and returns the client's address and all that the server
// says. The connection stays open until the test ends.
func from(t *testing.T, h *netns.Host, port uint16, address string) (own netip.AddrPort, said string) {
	t.Helper()
	at := netip.AddrPortFrom(netns.Pick([]netip.Addr{h.IPv4, h.IPv6}, netip.MustParseAddrPort(address).Addr()), port)
	c, err := h.Dialer(&net.Dialer{Timeout: startTimeout, LocalAddr: net.TCPAddrFromAddrPort(at)}, "tcp", address)
	must.OKf(t, err, "%s to %s", at, address)
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(startTimeout))
	text, err := io.ReadAll(c)
	check.OKf(t, err, "%s to %s", at, address)
	return netip.MustParseAddrPort(c.LocalAddr().String()), string(text)
}
