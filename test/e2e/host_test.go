package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestNodeIsFollowedWhileItChanges has a proxy that recognises pods by their
// interfaces (A4.6), on a node whose pod has an interface of another name at
// first. Under policy Local without a local endpoint, the pod gets no answer until
// its interface is renamed. From then on it reaches the remote endpoint, with its
// own address (A3.6). An address that is added to the node gets node ports (A4.4).
func TestNodeIsFollowedWhileItChanges(t *testing.T) {
	t.Parallel()
	m := modes[0]
	const patience = 300 * time.Millisecond
	w := newWorld(t, "tcp", []row{{name: "there", endpoints: "there", external: "Local"}, {name: "both", endpoints: "here there"}})
	local, both := w.services[0], w.services[1]
	pod := w.clients[slices.IndexFunc(w.clients, func(c client) bool { return c.name == "pod" })]
	outside := client{name: "outside", Host: w.Outside}
	p := w.proxy(t, m)
	p.start("--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "late-")
	for _, to := range local.at(nodePort) {
		check.Equalf(t, pod.dial(to, w.nodeAddrs, patience), "silent", "A3.5 a client that is not known for a pod, to %s", to)
	}

	nl := w.Node.Netlink()
	link := must.Get(nl.LinkByName(pod.Name()))(t)
	const late = "late-0"
	for _, do := range []func() error{
		func() error { return nl.LinkSetDown(link) },
		func() error { return nl.LinkSetName(link, late) },
		func() error { return nl.LinkSetUp(link) },
		func() error { return w.Node.AddAddr(late, whole(netns.NodePods[1].Addr().Next())) }, // the kernel removes IPv6 addresses with the link
		func() error { return w.Node.AddLinkRoute(whole(pod.IPv4), late) },
		func() error { return w.Node.AddLinkRoute(whole(pod.IPv6), late) },
	} {
		must.OK(t, do())
	}
	want := w.named("there client", local)[0]
	for _, to := range local.at(nodePort) {
		wait.Equal(t, "A3.6 a pod, by its interface", startTimeout, want, func() string { return pod.dial(to, w.nodeAddrs, patience) })
		check.Equalf(t, outside.dial(to, w.nodeAddrs, patience), "silent", "A3.5 %s to %s", outside.name, to)
	}
	for _, to := range local.at(clusterIP) {
		check.Equalf(t, pod.dial(to, w.nodeAddrs, startTimeout), want, "A3.9 a pod to %s", to)
	}

	more := netip.MustParseAddr("10.1.0.60")
	must.OK(t, w.Node.AddAddr(w.Outside.Name(), whole(more)))
	to := netip.AddrPortFrom(more, both.nodePort)
	wait.For(t, "A4.4 a node port at a new address", startTimeout, func() error {
		if got := outside.dial(to, w.nodeAddrs, patience); !slices.Contains(w.named("any node", both), got) {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	p.stop()
}

func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
