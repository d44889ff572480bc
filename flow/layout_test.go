package flow

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Flows of a process whose maps differ (here in size) go on in the next one's: each session keeps its
// endpoint, each connection its bytes, and each leaves one record. Nothing of that process stays.
func TestFlowsInMapsOfAnotherLayoutGoOn(t *testing.T) {
	lab := localNode(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	root := netns.MountBPF(t)
	pinned := func(flows int, keep bool) func(*Options) { // the maps' size is of their version
		return func(o *Options) { o.BPFRoot, o.Name, o.MaxFlows, o.Keep = root, "test", flows, keep }
	}
	endpoints := []netip.AddrPort{at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)}
	services := svc(vip4, func(s *corev1.Service) {
		balanced(balancer4)(s)
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster // hides clients
	}, endpoints...)
	first := newNode(t, lab, pinned(1000, true))
	first.apply(services)
	first.servesNode()
	type client struct {
		net.Conn
		said string
	}
	var clients []client
	dial := func(from *netns.Host, network, to string) {
		c := from.Connect(t, network, to)
		ask := netns.AskOn
		if network == "udp" {
			ask = question
		}
		said := must.Get(ask(c))(t)
		clients = append(clients, client{c, said})
	}
	for range 8 {
		for _, to := range []string{vip4 + ":80", balancer4 + ":80"} {
			dial(lab.Client, "udp", to)
			dial(lab.Client, "tcp", to)
		}
		dial(lab.Node, "tcp", vip4+":80")
		dial(lab.Node, "udp", vip4+":80")
	}
	goOn := func() {
		t.Helper()
		for _, c := range clients {
			if c.LocalAddr().Network() == "udp" {
				if said, err := question(c); err != nil || said != c.said {
					t.Errorf("%s to %s: %q after %q, %v", c.LocalAddr(), c.RemoteAddr(), said, c.said, err)
				}
				continue
			}
			_, err := io.WriteString(c, "ping")
			b := make([]byte, 4)
			if err == nil {
				_, err = io.ReadFull(c, b)
			}
			if err != nil || string(b) != "ping" {
				t.Errorf("%s to %s: %q, %v", c.LocalAddr(), c.RemoteAddr(), b, err)
			}
		}
	}
	wait.True(t, "all are known", func() bool { return first.server.Stats().Open == int64(len(clients)) })
	goOn()
	first.leave()
	goOn() // while nobody runs

	next := newNode(t, lab, pinned(2000, false))
	goOn() // it knows no Services yet
	next.apply(services)
	goOn()
	wait.True(t, "all are adopted", func() bool { return next.server.Stats().Open == int64(len(clients)) })
	for _, c := range clients {
		_ = c.Close()
	}
	wait.For(t, "their records", patience, func() error {
		ended := make(map[string]conntrack.Record) // clients of UDP and TCP may have one port
		for _, r := range next.taken() {
			key := fmt.Sprint(r.Protocol == service.UDP, r.Client, r.VIP)
			if _, twice := ended[key]; twice {
				t.Errorf("a second record: %+v", r)
			}
			ended[key] = r
		}
		for _, c := range clients {
			if r, found := ended[fmt.Sprint(false, c.LocalAddr(), c.RemoteAddr())]; c.LocalAddr().Network() == "tcp" && (!found || r.End != conntrack.ClientFin || r.BytesFromClient < 16 || r.Endpoint == nil || !strings.HasPrefix(c.said, "b")) {
				return fmt.Errorf("%s: %+v", c.LocalAddr(), r)
			}
		}
		return nil
	})
	wait.For(t, "that process's pins are gone", patience, func() error {
		names, err := os.ReadDir(string(pinsOf(t, root, lab)))
		for _, name := range names {
			if !strings.Contains(name.Name(), "_2000_") {
				return fmt.Errorf("%s is there", name.Name())
			}
		}
		return err
	})
}

// Programs of another version see the ends of the connections that they keep, though their successors
// see all packets first. A process of that version writes the records.
func TestEndsAreSeenBehindAnotherVersion(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(flows int, keep bool) func(*Options) {
		return func(o *Options) { o.BPFRoot, o.Name, o.MaxFlows, o.Keep = root, "test", flows, keep }
	}
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	n := newNode(t, lab, pinned(1000, true))
	n.apply(services)
	var clients []net.Conn
	for range 4 {
		c := lab.Client.Connect(t, "tcp", vip4+":80")
		must.OK(t, must.Err(netns.AskOn(c)))
		clients = append(clients, c)
	}
	wait.True(t, "all are known", func() bool { return n.server.Stats().Open == int64(len(clients)) })
	n.leave()
	const room = 2
	n = newNode(t, lab, pinned(room, true))
	n.apply(services)
	wait.True(t, "those for which there is room are adopted", func() bool { return n.server.Stats().Open == room })
	taken := make(map[string]bool)
	n.onLoop(func() {
		for _, f := range n.server.worker.flows {
			if f != nil {
				taken[bpf.PortOf(f.shared().Client, f.shared().ClientPort).String()] = true
			}
		}
	})
	for _, c := range clients {
		if !taken[c.LocalAddr().String()] {
			must.OK(t, c.(*net.TCPConn).CloseWrite())
			must.OK(t, must.Err(io.Copy(io.Discard, c)))
		}
	}
	n.leave()
	n = newNode(t, lab, pinned(1000, false))
	n.apply(services)
	wait.True(t, "the records of those", func() bool { return n.endedBy(conntrack.ClientFin) == len(clients)-room })
	for _, c := range clients {
		_ = c.Close()
	}
	wait.True(t, "all records", func() bool { return n.endedBy(conntrack.ClientFin) == len(clients) })
	n.onLoop(func() { // what limits count
		loads, used := uint64(0), uint64(0)
		for i := range n.server.kernel.Loads {
			loads += n.server.kernel.Loads[i].Opened - n.server.kernel.Loads[i].Ended
		}
		for i := range n.server.kernel.Flows {
			if n.server.kernel.Flows[i].State != bpf.KernelStateFREE {
				used++
			}
		}
		check.Equalf(t, loads, used, "service ports count %d flows", loads)
	})
}
