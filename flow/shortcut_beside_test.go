package flow

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// echoed sends blocks to an echo server, at a pace, and compares what comes back.
func echoed(c net.Conn, blocks int, pace time.Duration) error {
	block := bytes.Repeat([]byte("0123456789abcde\n"), 4096)
	go func() {
		for range blocks {
			if _, err := c.Write(block); err != nil {
				return // the reader says so
			}
			time.Sleep(pace)
		}
	}()
	got := make([]byte, len(block))
	for i := range blocks {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if n, err := io.ReadFull(c, got); err != nil {
			return fmt.Errorf("block %d, after %d bytes: %w", i, n, err)
		}
		if !bytes.Equal(got, block) {
			return fmt.Errorf("block %d has other bytes", i)
		}
	}
	return nil
}

// TestShortcutsBesideAFirewall: connections that are open or begin while a firewall with
// connection tracking comes and goes lose nothing.
func TestShortcutsBesideAFirewall(t *testing.T) {
	t.Parallel()
	s := newShortcutNet(t, false)
	stop := make(chan struct{})
	var clients sync.WaitGroup
	defer clients.Wait()
	defer close(stop)
	for i := range 4 {
		clients.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				c, err := s.lab.Client.Dial("tcp", net.JoinHostPort([]string{vip4, vip6}[i%2], "80"))
				if err != nil {
					t.Error(err)
					return
				}
				if _, err = io.ReadFull(c, make([]byte, len("b1:8080\n"))); err == nil {
					err = echoed(c, 1+i/2*50, 5*time.Millisecond)
				}
				c.Close()
				if err != nil {
					t.Errorf("connection %d: %v", n, err)
					return
				}
			}
		})
	}
	for range 3 {
		s.lab.Node.NFT(t, "table inet other {"+states("")+"\n}")
		s.awaitShortcuts(false)
		s.ask(50)
		s.lab.Node.NFT(t, "delete table inet other")
		s.awaitShortcuts(true)
		s.ask(50)
	}
}

// TestShortcutsOfABridge: packets skip the IP stack from a bridge's pods and to them, but
// the stack leads those from one pod of it to another, and to a pod with XDP.
func TestShortcutsOfABridge(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 0)
	nl := lab.Node.Netlink()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "pods"}}
	must.OK(t, nl.LinkAdd(bridge))
	gateways := []string{"10.3.0.1", "fd00:3::1"}
	for i, prefix := range []string{"/24", "/64"} {
		a := must.Get(netlink.ParseAddr(gateways[i] + prefix))(t)
		const noDAD = 2 // IFA_F_NODAD: usable at once
		a.Flags = noDAD
		must.OK(t, nl.AddrAdd(bridge, a))
	}
	must.OK(t, nl.LinkSetUp(bridge))
	var pods []*netns.Host
	for i := range 2 {
		p := &netns.Host{
			Namespace: netns.New(t, fmt.Sprintf("p%d", i)),
			IPv4:      netip.AddrFrom4([4]byte{10, 3, 0, byte(10 + i)}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd00:3::%d", 10+i)),
		}
		netns.Wire(t, lab.Node.Namespace, p.Name(), nil, p.Namespace, "eth0", []netip.Prefix{netip.PrefixFrom(p.IPv4, 24), netip.PrefixFrom(p.IPv6, 64)})
		must.OK(t, nl.LinkSetMaster(lab.Node.Link(t, p.Name()), bridge))
		must.OK(t, p.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(gateways[0])))
		must.OK(t, p.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr(gateways[1])))
		p.EchoTCP(t, 8080)
		p.EchoUDP(t, 8080)
		pods = append(pods, p)
	}
	s := &shortcutNet{node: newNode(t, lab, nil)}
	s.awaitShortcuts(true)
	s.config.MasqueradeAll = true // or a pod would answer the other one directly
	s.apply(named("four", svc(vip4, nil, at(pods[1].IPv4, 8080))))
	s.apply(named("six", svc(vip6, nil, at(pods[1].IPv6, 8080))))
	var fromOutside []net.Conn
	for _, c := range []struct {
		client   *netns.Host
		network  string
		shortcut bool
	}{
		{lab.Client, "udp", true},
		{pods[0], "tcp", false},
		{pods[0], "udp", false},
		{lab.Client, "tcp", true}, // the last one: the client acknowledges answers later
	} {
		for _, vip := range []string{vip4, vip6} {
			var conn net.Conn
			wait.For(t, "the bridge forwards", patience, func() (err error) {
				if conn, err = c.client.Dial(c.network, net.JoinHostPort(vip, "80")); err != nil {
					return err
				}
				_ = conn.SetDeadline(time.Now().Add(time.Second))
				_, err = line(conn)
				return err
			})
			t.Cleanup(func() { conn.Close() })
			s.conns = []net.Conn{conn}
			if c.shortcut {
				s.awaitMost()
				fromOutside = append(fromOutside, conn)
			} else if took := s.ask(50); took > 0 {
				t.Errorf("%s by %s to %s: %d packets skipped the IP stack", c.client.Name(), c.network, vip, took)
			}
		}
	}
	s.conns = fromOutside
	s.passXDP(pods[1], link.XDPGenericMode, "pods", 0)
}

// passXDP has an XDP program come to a pod's own interface, and waits until the ways into an
// interface that leads to the pod are others. All packets have to pass the program.
func (s *shortcutNet) passXDP(pod *netns.Host, flags link.XDPAttachFlags, by string, ways bpf.KernelWay) {
	s.t.Helper()
	p := foreign.NewCounter(s.t)
	l := foreign.AttachXDP(s.t, pod, p.Program, flags)
	index := uint32(s.lab.Node.Link(s.t, by).Attrs().Index)
	wait.For(s.t, "the ways to the pod are others", patience, func() error {
		var is bpf.KernelWay
		if err := s.server.kernel.Maps.Ways.Lookup(index, &is); err != nil {
			return err
		}
		if is&^bpf.KernelWayWAY_FROM != ways {
			return fmt.Errorf("ways %b", is)
		}
		return nil
	})
	const questions = 50
	before, want := p.Count(s.t), uint64(questions*len(s.conns))
	took := s.ask(questions)
	if met := p.Count(s.t) - before; met < want {
		s.t.Errorf("%d of %d packets passed the pod's XDP program", met, want)
	}
	if took < want*8/10 { // the answers at least
		s.t.Errorf("%d packets skipped the IP stack", took)
	}
	must.OK(s.t, l.Close())
	s.awaitMost()
}

// TestShortcutsMeetXDPOfAPod: packets of open connections pass an XDP program that comes to a
// pod's own interface. Where redirected ones would pass it by, they take the node's IP stack.
func TestShortcutsMeetXDPOfAPod(t *testing.T) {
	t.Parallel()
	s := newShortcutNet(t, false)
	s.awaitMost()
	s.passXDP(s.lab.Backends[0], link.XDPDriverMode, "b1", bpf.KernelWayWAY_INTO)
	s.passXDP(s.lab.Backends[0], link.XDPGenericMode, "b1", 0)
}

// TestShortcutsEndByANetfilterProgram: packets of open connections pass a BPF program that comes
// to netfilter's hook.
func TestShortcutsEndByANetfilterProgram(t *testing.T) {
	requireRoot(t)
	if err := features.HaveProgramType(ebpf.Netfilter); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("SKIP-NEEDS: BPF programs of netfilter (Linux 6.4): %v", err)
	}
	s := newShortcutNet(t, false)
	s.awaitMost()
	l := foreign.AttachNetfilter(t, s.lab.Node, link.NetfilterProtoIPv4, link.NetfilterInetForward)
	s.awaitShortcuts(false)
	if took := s.ask(50); took > 0 {
		t.Errorf("%d packets skipped another one's program", took)
	}
	must.OK(t, l.Close())
	s.awaitMost()
}
