package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestNodesOwnAddressIsFollowed has connections from the node use the InternalIP
// of its Node object (F8), whichever interface is first. When that address is
// removed and added again, several times, the routes must follow, and the proxy
// must not treat this as another program's change.
func TestNodesOwnAddressIsFollowed(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		const rounds = 5
		lab := netns.NewLab(t, 1)
		lab.Backends[0].WitnessTCP(t, 8080)
		// The lab's first interface has another address.
		internal := []netip.Addr{netip.MustParseAddr("10.7.7.7"), netip.MustParseAddr("fd00:7::7")}
		link := must.Get(lab.Node.Netlink().LinkByName(lab.Backends[0].Name()))(t)
		add := func() {
			for _, a := range internal {
				must.OK(t, lab.Node.AddAddr(lab.Backends[0].Name(), whole(a)))
			}
		}
		add()
		p := prepareProxy(t, lab, []webService{webOn(lab)})
		p.mode = m
		p.write("node.yaml", nodeYAML("node", internal, netns.NodePods))
		p.start(promptDials)
		own := func(address string) string {
			c, err := lab.Node.Dialer(&net.Dialer{Timeout: time.Second}, "tcp", address)
			if err != nil {
				return err.Error()
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Second))
			if got, err := netns.AskOn(c); err != nil || !strings.HasPrefix(got, "b1:") {
				return fmt.Sprintf("%q, %v", got, err)
			}
			return netip.MustParseAddrPort(c.LocalAddr().String()).Addr().String()
		}
		for f, address := range addresses(80, vip4, vip6) {
			wait.Equal(t, "from the Node object's address to "+address, startTimeout, internal[f].String(), func() string { return own(address) })
		}
		var failed sync.Map
		var made, early, removed, latest atomic.Int64
		done := make(chan struct{})
		var clients sync.WaitGroup
		for _, address := range addresses(80, vip4, vip6) {
			clients.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					// A connection that had the address when it was removed waits
					// in vain; until the routes have another source, the kernel
					// fails at once to send from the old one.
					made.Add(1)
					got, now := own(address), time.Now().UnixNano()
					switch {
					case strings.Contains(got, "unreachable"):
						early.Add(1)
						latest.Store(max(latest.Load(), now-removed.Load()))
					case !isAddress(got) && !strings.Contains(got, "timeout"):
						failed.Store(address+": "+got, nil)
					}
				}
			})
		}
		for round := range rounds {
			list := must.Get(lab.Node.Netlink().AddrList(link, 0))(t)
			removed.Store(time.Now().UnixNano())
			for _, a := range list {
				if ip, _ := netip.AddrFromSlice(a.IP); ip.Unmap() == internal[0] || ip == internal[1] {
					must.OK(t, lab.Node.Netlink().AddrDel(link, &a))
				}
			}
			for f, address := range addresses(80, vip4, vip6) {
				wait.Equal(t, fmt.Sprintf("round %d: the address is gone: to %s", round, address), startTimeout, "another", func() string {
					if got := own(address); !isAddress(got) || got == internal[f].String() || strings.Contains(address, got) {
						return got
					}
					return "another"
				})
			}
			add()
			for f, address := range addresses(80, vip4, vip6) {
				wait.Equal(t, fmt.Sprintf("round %d: the address is back: to %s", round, address), startTimeout, internal[f].String(), func() string { return own(address) })
			}
		}
		close(done)
		clients.Wait()
		t.Logf("%d connections while the address went and came back %d times, %d of them before the routes followed, %v after the removal at most", made.Load(), rounds, early.Load(), time.Duration(latest.Load()))
		failed.Range(func(what, _ any) bool {
			t.Errorf("failed: %v", what)
			return true
		})
		if p.stderr.Contains("somebody had changed") {
			t.Error("the log says that somebody had changed the kernel's tables")
		}
		p.stop()
	})
}

func isAddress(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil
}
