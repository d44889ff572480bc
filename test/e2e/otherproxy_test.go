package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// labeled assigns a Service's manifest to another proxy (A1.1).
func labeled(yaml, proxyName string) string {
	return strings.Replace(yaml, "metadata:\n", "metadata:\n  labels: {service.kubernetes.io/service-proxy-name: "+proxyName+"}\n", 1)
}

// byUDP changes a manifest's Service and endpoints to UDP.
func byUDP(yaml string) string { return strings.ReplaceAll(yaml, "protocol: TCP", "protocol: UDP") }

// TestServicesOfAnotherProxyAreLeftAlone has two Services of another proxy in the
// service ranges (A1.1): rules for address translation serve one of them, as
// kube-proxy's do, and a route leads to the addresses of the other. Then one of
// our Services is assigned to another proxy, and back.
func TestServicesOfAnotherProxyAreLeftAlone(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		lab := netns.NewLab(t, 2)
		lab.EchoTCP(t, 8080)
		lab.EchoUDP(t, 8080)
		ours, translated, routed := webOn(lab), webOn(lab), webOn(lab)
		ours.endpoints = on(8080, lab.Backends[0])
		translated.name, translated.vips = "translated", []string{"10.96.0.20", "fd00:96::20"}
		routed.name, routed.vips, routed.port = "routed", []string{"10.96.0.21", "fd00:96::21"}, 8080
		translate(t, lab, "other", translated)
		for _, via := range []netip.Addr{lab.Client.IPv4, lab.Client.IPv6} {
			// The rules see the node's own packets only after the kernel found a
			// route.
			must.OK(t, lab.Node.AddRoute(netip.PrefixFrom(zero(via), 0), via))
		}
		for _, a := range routed.vips {
			host := netip.MustParseAddr(a)
			via := netns.Pick([]netip.Addr{lab.Backends[1].IPv4, lab.Backends[1].IPv6}, host)
			whole := netip.PrefixFrom(host, host.BitLen())
			must.OK(t, lab.Backends[1].AddAddr("lo", whole))
			must.OK(t, lab.Node.AddRoute(whole, via))
		}
		p := prepareProxy(t, lab, []webService{ours})
		p.mode = m
		p.write("translated.yaml", labeled(translated.yaml(), "other"))
		p.write("routed.yaml", labeled(routed.yaml(), `""`))
		p.start()
		const labelAdded = "label added"
		answers := func(when, want string, s webService, networks ...string) {
			t.Helper()
			for _, h := range []*netns.Host{lab.Client, lab.Node} {
				if h == lab.Node && when == labelAdded && m.programs != "" {
					continue // see "a port at an address that is not this node's" in docs/steering.md
				}
				for _, a := range addresses(s.port, s.vips...) {
					for _, network := range networks {
						wait.Equal(t, fmt.Sprintf("%s: %s by %s to %s", when, h.Name(), network, a), startTimeout, want, func() string {
							_, got := (client{Host: h}).visit(network, netip.MustParseAddrPort(a), nil, silence)
							name, _, _ := strings.Cut(got, ":")
							return name
						})
					}
				}
			}
		}
		answers("ours", "b1", ours, "tcp")
		answers("rules of another proxy", "b2", translated, "tcp", "udp")
		answers("routes of another proxy", "b2", routed, "tcp")
		for i, vip := range translated.vips {
			taking := strings.Replace(ours.yaml(), "spec:\n", fmt.Sprintf("spec:\n  externalIPs: [%q]\n", vip), 1)
			p.settled(func() { p.write("web.yaml", taking) })
			answers(fmt.Sprintf("external IP %d of ours", i), "b2", translated, "tcp", "udp")
		}
		held := hold(t, lab.Client, addresses(80, vip4)[0], 1)

		p.settled(func() { p.write("web.yaml", labeled(ours.yaml(), "other")) })
		translate(t, lab, "more", ours)
		answers(labelAdded, "b2", ours, "tcp", "udp")
		alive(t, held)
		endTranslation(t, lab, "more")
		p.settled(func() { p.apply(ours) })
		answers("label removed", "b1", ours, "tcp")
		alive(t, held)
		p.settled(func() { p.remove("translated") })
		endTranslation(t, lab, "other")
		for _, a := range addresses(80, translated.vips...) {
			check.OKf(t, m.unallocated(lab.Client, a), "the other proxy's Service is gone: %s", a)
		}
		answers("beside one that is gone", "b2", routed, "tcp")
		check.Equalf(t, must.Get(p.metrics())(t)["sluice_steering_repairs_total"], 0, "repairs")
		p.stop()
	})
}

// unallocated expects an address without a Service to drop, or to refuse if the
// mode cannot drop there (A3.12).
func (m mode) unallocated(from *netns.Host, address string) error {
	if m.name == "bind" {
		return refused(from, address)
	}
	return unanswered(from, address)
}

// translate is another proxy, which translates packets to two Services to the
// second backend.
func translate(t *testing.T, lab *netns.Lab, table string, list ...webService) {
	t.Helper()
	var b strings.Builder
	b.WriteString("table inet " + table + " {\n")
	for _, hook := range []string{"prerouting", "output"} {
		fmt.Fprintf(&b, "chain %s { type nat hook %s priority -100;\n", hook, hook)
		for _, s := range list {
			for _, a := range s.vips {
				ip, to := "ip", netip.AddrPortFrom(lab.Backends[1].IPv4, 8080)
				if netip.MustParseAddr(a).Is6() {
					ip, to = "ip6", netip.AddrPortFrom(lab.Backends[1].IPv6, 8080)
				}
				for _, p := range []string{"tcp", "udp"} {
					fmt.Fprintf(&b, "%s daddr %s %s dport %d dnat %s to %s\n", ip, a, p, s.port, ip, to)
				}
			}
		}
		b.WriteString("}\n")
	}
	b.WriteString("}\n")
	file := filepath.Join(t.TempDir(), "other.nft")
	must.OK(t, os.WriteFile(file, []byte(b.String()), 0o644))
	must.Run(t, lab.Node.Command(t, administration(t, "nft"), "-f", file))
}

func endTranslation(t *testing.T, lab *netns.Lab, table string) {
	t.Helper()
	must.Run(t, lab.Node.Command(t, administration(t, "nft"), "delete", "table", "inet", table))
}

// TestSecondProxyBesideOurs runs two Sluice proxies in one network namespace, the
// second for the Services with its label (A1.2). Each must serve its own Services,
// and the end of one must not affect the other.
func TestSecondProxyBesideOurs(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		lab := netns.NewLab(t, 2)
		lab.EchoTCP(t, 8080)
		lab.EchoUDP(t, 8080)
		ours, theirs := webOn(lab), webOn(lab)
		ours.endpoints, theirs.endpoints = on(8080, lab.Backends[0]), on(8080, lab.Backends[1])
		theirs.name, theirs.vips = "theirs", []string{"10.96.0.20", "fd00:96::20"}
		first := prepareProxy(t, lab, []webService{ours})
		first.mode = m
		theirUDP := theirs
		theirUDP.name, theirUDP.vips = "their-udp", []string{"10.96.0.21", "fd00:96::21"}
		first.write("theirs.yaml", labeled(theirs.yaml(), "second"))
		first.write("their-udp.yaml", labeled(byUDP(theirUDP.yaml()), "second"))
		second := newProxy(t, lab.Node)
		second.mode, second.manifests = m, first.manifests
		names := []string{"--nft-table", "second", "--steer-mark", "0x10000", "--reply-mark", "0x20000", "--socket-mark", "0x40000",
			"--route-table-steer", "9376", "--route-table-replies", "9377"}
		flags := slices.Concat([]string{"--service-proxy-name", "second", "--metrics-bind-address", "127.0.0.1:10259"}, names)
		first.start("--reply-ports", "10000-10999")
		flags = append(flags, "--reply-ports", "off")
		second.start(flags...)
		answers := func(when, want string, s webService, network string) {
			t.Helper()
			for _, h := range []*netns.Host{lab.Client, lab.Node} {
				for _, a := range addresses(80, s.vips...) {
					if _, got := (client{Host: h}).visit(network, netip.MustParseAddrPort(a), nil, startTimeout); !strings.HasPrefix(got, want) {
						t.Errorf("%s: %s by %s to %s: %s, want %s", when, h.Name(), network, a, got, want)
					}
				}
			}
		}
		both := func(when string) {
			t.Helper()
			answers(when, "b1:", ours, "tcp")
			answers(when, "b2:", theirs, "tcp")
			answers(when, "b2:", theirUDP, "udp")
		}
		both("two proxies")
		more := webOn(lab)
		more.name, more.vips = "more", []string{"10.96.0.22", "fd00:96::22"}
		first.settled(func() { first.write("more.yaml", labeled(more.yaml(), "third")) })
		both("after a change")
		first.kill()
		answers("the first is killed", "b2:", theirs, "tcp")
		first.start("--reply-ports", "10000-10999")
		both("the first is back")
		second.signal(syscall.SIGKILL)
		second.waitExit()
		answers("the second is killed", "b1:", ours, "tcp")
		during := stateOf(t, lab.Node)
		if out, err := sluice(t, lab, "cleanup"); err == nil || changes(during, stateOf(t, lab.Node)) != "" {
			t.Errorf("cleanup beside a running proxy: %v\n%s", err, out)
		}
		if out, err := sluice(t, lab, append([]string{"cleanup"}, names...)...); err != nil {
			t.Errorf("cleanup of the second: %v\n%s", err, out)
		}
		answers("the second is cleaned up", "b1:", ours, "tcp")
		for _, p := range []*proxy{first, second} {
			if p.stderr.Contains("somebody had changed") && m.programs == "" { // both proxies want to be first in iptables' chains
				t.Errorf("the two had something to repair:\n%s", p.stderr)
			}
		}
		first.stop()
	})
}

// zero is the unspecified address of the same family.
func zero(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
