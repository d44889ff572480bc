package e2e

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestHostsServersDoNotAnswerForAKilledProxy kills the proxy on a node whose own
// servers listen on all addresses, at the Service's ports. Until the next start,
// no client may reach them by the Service's addresses (F4), also external ones that are
// not the node's. Other ports of these addresses refuse or drop, and so do addresses that
// no Service has.
func TestHostsServersDoNotAnswerForAKilledProxy(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(shieldAfterKill) {
			return
		}
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		lab.Backends[0].EchoUDP(t, 8080)
		for _, port := range []uint16{80, 81} {
			lab.Node.EchoTCP(t, port)
			lab.Node.EchoUDP(t, port)
		}
		web, dns := webOn(lab), webOn(lab)
		dns.name, dns.vips = "dns", []string{"10.96.0.11", "fd00:96::11"}
		external := map[string][]string{"tcp": nonLocalIPs, "udp": {"203.0.113.11", "2001:db8:113::11"}}
		for _, a := range nonLocalIPs {
			a := netip.MustParseAddr(a)
			via, bits := lab.Client.IPv4, 24
			if a.Is6() {
				via, bits = lab.Client.IPv6, 48
			}
			must.OK(t, lab.Node.AddRoute(netip.PrefixFrom(a, bits).Masked(), via))
		}
		p := newProxy(t, lab.Node)
		p.write("web.yaml", at(external["tcp"], web.yaml()))
		p.write("dns.yaml", at(external["udp"], strings.ReplaceAll(dns.yaml(), "protocol: TCP", "protocol: UDP")))
		p.mode = m
		variants := [][]string{nil}
		if m.name == modes[0].name { // for cluster IPs with the node's address alone, fewer netfilter rules exist
			// Without a pin, rules of netfilter refuse.
			variants = append(variants, []string{"--reply-ports", "off"}, []string{"--bpf-root", ""}, []string{"--bpf-root", "", "--reply-ports", "off"})
		}
		for _, flags := range variants {
			p.start(flags...)
			var attempts []attempt
			for _, h := range []*netns.Host{lab.Client, lab.Node} {
				for _, a := range addresses(80, web.vips...) {
					attempts = append(attempts, samePorts(t, h, a))
				}
				for _, a := range addresses(80, dns.vips...) {
					if _, got := (client{Host: h}).visit("udp", netip.MustParseAddrPort(a), nil, startTimeout); !strings.HasPrefix(got, "b1:") {
						t.Fatalf("%s to %s: %s", h.Name(), a, got)
					}
				}
				for _, port := range []uint16{80, 81} {
					for _, network := range []string{"tcp", "udp"} {
						for _, a := range addresses(port, slices.Concat(web.vips, dns.vips)...) {
							attempts = append(attempts, m.attempt(h, network, a, true))
						}
						for _, a := range addresses(port, "10.96.77.77", "fd00:96::7777") {
							attempts = append(attempts, m.attempt(h, network, a, false))
						}
					}
				}
				for network, ips := range external {
					// Errors about the node's own datagrams do not come back.
					refuses := !m.lacks(nonLocalRefusals) && !(h == lab.Node && network == "udp")
					for _, a := range addresses(80, ips...) {
						attempts = append(attempts, m.attempt(h, network, a, refuses))
					}
				}
			}
			p.kill()
			var running sync.WaitGroup
			for _, a := range attempts {
				running.Go(func() {
					check.OKf(t, a.do(), "flags %q: %s", flags, a.name)
				})
			}
			running.Wait()
			if out, err := sluice(t, lab, "cleanup"); err != nil { // the next one may not find the pin
				t.Fatalf("cleanup: %v\n%s", err, out)
			}
		}
		// This does not affect the host's own addresses.
		if got, err := lab.Client.Ask("tcp", addresses(80, lab.Node.IPv4.String())[0]); err != nil || !strings.HasPrefix(got, "node:") {
			t.Errorf("the host's own server: %q, %v", got, err)
		}
	})
}

// at adds external IPs to a Service.
func at(ips []string, yaml string) string {
	return strings.Replace(yaml, "spec:\n", "spec:\n  externalIPs: ["+quoted(ips)+"]\n", 1)
}

// attempt returns an error if a server answers.
type attempt struct {
	name string
	do   func() error
}

// attempt expects an address of a Service to refuse, and any other to drop or
// refuse.
func (m mode) attempt(from *netns.Host, network, to string, ofService bool) attempt {
	maySilent := !ofService || m.lacks(lateRefusals)
	patience := startTimeout
	if maySilent {
		patience = 300 * time.Millisecond
	}
	return attempt{from.Name() + " by " + network + " to " + to, func() error {
		switch _, got := (client{Host: from}).visit(network, netip.MustParseAddrPort(to), nil, patience); {
		case got == "refused", got == "silent" && maySilent:
			return nil
		case ofService && strings.HasSuffix(got, unix.ECONNRESET.Error()):
			return nil // a program that the killed proxy began to run holds its sockets until it is loaded
		case ofService && forwarded() && strings.HasPrefix(got, "b1:"):
			return nil // the kernel decides about the Service by itself
		default:
			return errorText(got)
		}
	}}
}

// samePorts connects. The function that it returns connects between the same ports
// again, after the server's end has closed first: that end then waits in the
// kernel in TIME_WAIT.
func samePorts(t *testing.T, from *netns.Host, address string) attempt {
	t.Helper()
	c := must.Get(from.Dial("tcp", address))(t)
	if got, err := netns.AskOn(c); err != nil || !strings.HasPrefix(got, "b1:") {
		t.Fatalf("%s to %s: %q, %v", from.Name(), address, got, err)
	}
	const patience = 500 * time.Millisecond
	return attempt{from.Name() + " between the same ports again to " + address, func() error {
		if forwarded() { // it goes on, so that this end has to close
			_ = c.(*net.TCPConn).SetLinger(0)
		} else {
			_, _ = io.Copy(io.Discard, c)
		}
		_ = c.Close()
		again, err := from.Dialer(&net.Dialer{LocalAddr: c.LocalAddr(), Timeout: patience}, "tcp", address)
		if err != nil {
			return nil
		}
		defer again.Close()
		_ = again.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 100)
		if n, _ := again.Read(buf); n > 0 && !(forwarded() && strings.HasPrefix(string(buf[:n]), "b1:")) {
			return errorText(buf[:n])
		}
		return nil
	}}
}
