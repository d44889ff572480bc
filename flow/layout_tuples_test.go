package flow

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A client's own connection to an endpoint, and one of the node's own, have another port there by programs
// of another version. They and the Services' connections by that port go on in both directions, when the
// next version takes over and when the first one comes back. A version that does not know direct connections
// leaves them to the programs of the first one.
func TestDirectConnectionsGoOnBesideAnotherVersion(t *testing.T) {
	for _, c := range []struct{ hidden, stays bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
		lab := netns.NewLab(t, 1)
		root := netns.MountBPF(t)
		of := func(flows int, keep bool) func(*Options) { // the maps' size is of their version
			return func(o *Options) { o.BPFRoot, o.Name, o.Keep, o.MaxFlows = root, "test", keep, flows }
		}
		const port = 45000
		endpoint, vip := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddrPort(vip4+":80")
		services := svc(vip4, nil, endpoint)
		n := newNode(t, lab, of(4096, true))
		n.config.MasqueradeAll = c.hidden
		n.apply(services)
		m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
		list := []sides{m.must(t, port, vip)}
		if c.hidden {
			list = append(list, m.mustFrom(t, lab.Node, list[0][1].RemoteAddr().(*net.TCPAddr).AddrPort(), endpoint))
		} else {
			list = append(list, m.must(t, port, endpoint))
		}
		goOn := func(when string) {
			t.Helper()
			for i, s := range list {
				for from := range s {
					if err := say(s[from], m.random, func() (*net.TCPConn, error) { return s[1-from], nil }); err != nil {
						t.Fatalf("%+v, %s, connection %d: %v", c, when, i, err)
					}
				}
			}
		}
		wait.True(t, "it is known", func() bool { return n.server.Stats().Open == 1 })
		goOn("before")
		if c.stays {
			n.leaveUnread(bpf.KernelOptionOPTION_DIRECT)
		}
		for turn, flows := range []int{2048, 4096} {
			n.leave()
			goOn("while nobody runs")
			n = newNode(t, lab, of(flows, turn == 0))
			n.config.MasqueradeAll = c.hidden
			goOn("before it knows Services")
			n.apply(services)
			goOn("with the next version")
			n.onLoop(func() {
				if has := len(n.server.worker.direct) == 1; has != (!c.stays || turn == 1) {
					t.Errorf("%+v, turn %d: the next version has taken the direct connection: %v", c, turn, has)
				}
			})
		}
		for _, s := range list {
			must.OK(t, s.end(0))
		}
		wait.True(t, "the record", func() bool { return n.endedBy(conntrack.ClientFin) == 1 })
		n.finish()
	}
}

// leaveUnread has another version not understand flows with such options.
func (n *node) leaveUnread(options bpf.KernelOption) {
	for i := range n.server.kernel.Flows {
		if k := &n.server.kernel.Flows[i]; k.State != bpf.KernelStateFREE && k.Options&options == options {
			atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenCOLLIDED))
		}
	}
}

// A client uses the port of a connection that is over again, to a destination that kernel flows do not serve
// now. The node has the new connection, from the first packet on, also when the next version takes over,
// which records the earlier one.
func TestClosedFlowLeavesItsTupleToTheNode(t *testing.T) {
	lab := netns.NewLab(t, 1)
	root := netns.MountBPF(t)
	of := func(flows int, keep bool) func(*Options) {
		return func(o *Options) { o.BPFRoot, o.Name, o.Keep, o.MaxFlows = root, "test", keep, flows }
	}
	endpoint, vip := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddrPort(vip4+":80")
	n := newNode(t, lab, of(4096, true))
	n.apply(svc(vip4, nil, endpoint))
	m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
	const connections = 8
	connect := func() (list []sides) {
		t.Helper()
		for i := range connections {
			list = append(list, m.must(t, 45000+i, vip))
		}
		return list
	}
	end := func(list []sides) {
		t.Helper()
		for _, s := range list {
			must.OK(t, s.end(2))
		}
	}
	end(connect())
	earlier := connect()
	wait.True(t, "all are known", func() bool { return n.server.Stats().Open >= connections && len(n.taken()) == connections })
	n.apply(service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: "test", Name: "web"}}}})
	must.OK(t, lab.Node.Netlink().AddrAdd(lab.Node.Link(t, "lo"), &netlink.Addr{IPNet: netlink.NewIPNet(vip.Addr().AsSlice())}))
	l, err := lab.Node.Listen("tcp", vip.String())
	must.OK(t, err)
	defer l.Close()
	n.leave()
	end(earlier) // which nobody records
	m.server = l.(*net.TCPListener)
	relayed := connect()
	n = newNode(t, lab, of(2048, false))
	for _, s := range relayed {
		for from := range s {
			check.OK(t, say(s[from], m.random, func() (*net.TCPConn, error) { return s[1-from], nil }))
		}
	}
	end(relayed)
	end(connect())
	n.apply(named("other", svc("10.96.0.11", nil, endpoint))) // which adopts the earlier ones
	wait.True(t, "their records", func() bool { return len(n.taken()) == connections })
	n.finish()
}

// Connections that are over stay in a process's maps, as another version does not understand them. Their clients'
// next ones, by the same ports, are that version's: programs behind it leave these alone, and those of the next
// process, which come first again, do from the start.
func TestClosedFlowLeavesItsTupleToAnotherVersion(t *testing.T) {
	lab := netns.NewLab(t, 1)
	root := netns.MountBPF(t)
	of := func(flows int, keep bool) func(*Options) {
		return func(o *Options) { o.BPFRoot, o.Name, o.Keep, o.MaxFlows = root, "test", keep, flows }
	}
	endpoint, vip := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddrPort(vip4+":80")
	m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
	const connections = 8
	var n *node
	connect := func(flows int) (list []sides) {
		t.Helper()
		n = newNode(t, lab, of(flows, true))
		n.config.MasqueradeAll = flows == 2048
		n.apply(svc(vip4, nil, endpoint))
		for i := range connections {
			list = append(list, m.must(t, 45000+i, vip))
		}
		wait.True(t, "all are known", func() bool { return n.server.Stats().Open == connections })
		return list
	}
	earlier := connect(4096)
	n.leaveUnread(0)
	n.leave()
	for _, s := range earlier {
		must.OK(t, s.end(2))
	}
	later := connect(2048)
	n.leave()
	stop, talked := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			for _, s := range later {
				for from := range s {
					if err := say(s[from], m.random, func() (*net.TCPConn, error) { return s[1-from], nil }); err != nil {
						talked <- err
						return
					}
				}
			}
			select {
			case <-stop:
				talked <- nil
				return
			default:
			}
		}
	}()
	n = newNode(t, lab, of(4096, false))
	n.apply(svc(vip4, nil, endpoint))
	close(stop)
	must.OK(t, <-talked)
	n.onLoop(func() {
		check.Equalf(t, len(n.server.worker.direct), 0, "clients' own connections")
	})
	for _, s := range later {
		must.OK(t, s.end(0))
	}
	wait.True(t, "the records", func() bool {
		return n.endedBy(conntrack.ClientReset) == connections && n.endedBy(conntrack.ClientFin) == connections
	})
	n.finish()
}
