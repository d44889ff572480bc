package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// movedAddresses are load balancer IPs that come onto the node and go, as kube-vip and
// keepalived have them do.
var movedAddresses = []string{"192.0.2.10", "2001:db8::10"}

// TestAddressThatComesOntoTheNodeKeepsDatagrams has UDP sessions at load balancer IPs
// while these become the node's own, and go again (A3.15). All clients are answered: no
// socket of the sessions from before may take datagrams of clients that come later.
func TestAddressThatComesOntoTheNodeKeepsDatagrams(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if !m.lacks(nonLocalExternalIP) {
			addressComesAndGoes(t, m)
		}
	})
	t.Run("kernel", func(t *testing.T) { addressComesAndGoes(t, modes[0], "--datapath", "kernel") })
}

func addressComesAndGoes(t *testing.T, m mode, flags ...string) {
	lab := netns.NewLab(t, 2)
	for _, gateway := range []netip.Addr{lab.Client.IPv4, lab.Client.IPv6} { // the node needs a route to the addresses
		must.OK(t, lab.Node.AddRoute(netip.PrefixFrom(netip.MustParseAddr(map[bool]string{true: "0.0.0.0", false: "::"}[gateway.Is4()]), 0), gateway))
	}
	o := &object{name: "dns", vips: []string{vip4, vip6}, port: dnsPort, target: 5353, protocol: corev1.ProtocolUDP, lbIPs: movedAddresses}
	for _, h := range lab.Backends {
		h.EchoUDP(t, o.target)
		o.endpoints = append(o.endpoints, endpoint{host: h, node: "other"})
	}
	p := newProxy(t, lab.Node)
	p.mode, p.relayed = m, "the node has had clients at addresses that it has no more"
	p.put(o)
	p.start(append([]string{promptDials}, flags...)...)
	type old struct {
		what string
		net.Conn
	}
	var sessions []old
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, address := range addresses(dnsPort, movedAddresses...) {
			c := must.Get(from.Dial("udp", address))(t)
			defer c.Close()
			sessions = append(sessions, old{from.Name() + " asks " + address, c})
		}
	}
	answered := func(when string) {
		t.Helper()
		for _, c := range sessions {
			wait.For(t, when+": with its socket "+c.what, startTimeout, func() error { return askDatagram(c) })
		}
		for _, from := range []*netns.Host{lab.Client, lab.Node} {
			for _, address := range addresses(dnsPort, movedAddresses...) {
				wait.For(t, when+": with new sockets "+from.Name()+" asks "+address, freshTimeout, func() error {
					for _, c := range sessions { // they go on
						_ = c.SetDeadline(time.Time{})
						if _, err := c.Write([]byte("who")); err != nil {
							return err
						}
					}
					return askFresh(from, address)
				})
			}
		}
	}
	answered("before")
	link := must.Get(lab.Node.Netlink().LinkByName(lab.Client.Name()))(t)
	before := must.Get(p.metrics())(t)
	const metric = "sluice_port_claims"
	claims := func(more bool) { // waits until the proxy has noticed
		t.Helper()
		wait.For(t, "the proxy has noticed", startTimeout, func() error {
			now, err := p.metrics()
			if err == nil && m.name != "bind" && now[metric] > before[metric] != more { // bind has them all the time
				err = errNotYet
			}
			return err
		})
	}
	for round := range 2 {
		for _, a := range movedAddresses {
			must.OK(t, lab.Node.AddAddr(lab.Client.Name(), whole(netip.MustParseAddr(a))))
		}
		claims(true)
		answered(fmt.Sprintf("round %d, on the node", round))
		for _, a := range movedAddresses {
			ip := net.ParseIP(a)
			must.OK(t, lab.Node.Netlink().AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(whole(netip.MustParseAddr(a)).Bits(), whole(netip.MustParseAddr(a)).Bits())}}))
		}
		claims(false)
		answered(fmt.Sprintf("round %d, gone", round))
	}
	p.stop()
}

// freshTimeout is less than the life of a session: later, those from before would be gone.
const freshTimeout = 20 * time.Second

// freshClients is how many clients must be answered one after the other. Where sockets
// share datagrams, each misses its answer with a probability of about a half.
const freshClients = 24

// askFresh asks with new sockets.
func askFresh(from *netns.Host, address string) error {
	for i := range freshClients {
		c, err := from.Dial("udp", address)
		if err != nil {
			return err
		}
		err = askDatagram(c)
		_ = c.Close()
		if err != nil {
			return fmt.Errorf("client %d: %w", i, err)
		}
	}
	return nil
}

// askDatagram asks once and waits for the answer of an endpoint.
func askDatagram(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("who")); err != nil {
		return err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err == nil && !strings.HasPrefix(string(b[:n]), "b") {
		err = errors.New(string(b[:n]))
	}
	return err
}
