package flow

import (
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Cluster IPs of the tests.
const (
	vip4 = "10.96.0.10"
	vip6 = "fd00:96::10"
)

func TestConnectionPassesTheKernel(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		for _, b := range lab.Backends {
			b.WitnessTCP(t, 8080)
		}
		n := newNode(t, lab, by)
		for _, c := range []struct {
			vip  string
			ipv6 bool
		}{{vip4, false}, {vip6, true}} {
			t.Run(c.vip, func(t *testing.T) {
				client, b1, b2 := lab.Client.IPv4, lab.Backends[0].IPv4, lab.Backends[1].IPv4
				if c.ipv6 {
					client, b1, b2 = lab.Client.IPv6, lab.Backends[0].IPv6, lab.Backends[1].IPv6
				}
				n.apply(svc(c.vip, nil, at(b1, 8080), at(b2, 8080)))
				servers := make(map[string]int)
				for range 10 {
					said := must.Get(lab.Client.Ask("tcp", net.JoinHostPort(c.vip, "80")))(t)
					server, peer, _ := strings.Cut(said, " ")
					servers[server]++
					check.Containsf(t, peer, client.String(), "the endpoint saw")
				}
				if servers["b1:8080"] != 5 || servers["b2:8080"] != 5 {
					t.Errorf("not round-robin: %v", servers)
				}
			})
		}
		wait.For(t, "records", patience, func() error {
			records := n.taken()
			if len(records) != 20 {
				return fmt.Errorf("%d records of 20 connections", len(records))
			}
			for _, r := range records {
				if r.Path != conntrack.Kernel || r.End != conntrack.ClientFin || r.Attempts != 1 || !r.Connected || r.ConnectTime <= 0 ||
					r.FirstByte < r.ConnectTime || r.BytesFromClient != 12 || r.BytesFromEndpoint == 0 {
					t.Errorf("%+v", r)
				}
			}
			return nil
		})
	})
}

func TestDeadEndpointIsRetriedInTheHandshake(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.Backends[1].EchoTCP(t, 8080)
		n := newNode(t, lab, by)
		// Nothing listens on b1: it answers with an RST.
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
		for range 20 {
			must.Equal(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b2:8080")
		}
		wait.For(t, "records", patience, func() error {
			records := n.taken()
			if len(records) != 20 {
				return fmt.Errorf("%d records of 20 connections", len(records))
			}
			retried := 0
			for _, r := range records {
				if len(r.Failed) > 0 {
					retried++
					if r.Failed[0].Error != conntrack.DialRefused || r.Attempts != 2 {
						t.Errorf("%+v", r)
					}
				}
			}
			if retried == 0 {
				return fmt.Errorf("no connection met the dead endpoint")
			}
			return nil
		})
	})
}

func TestAllEndpointsDead(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		n := newNode(t, lab, by)
		n.relay.options.Plan = balancer.DefaultPlan()
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		took := time.Hour
		for try := 0; try < 3 && took > 6*time.Second; try++ { // a busy machine delays some
			began := time.Now()
			check.Error(t, must.Err(lab.Client.Ask("tcp", vip4+":80")), "refused")
			took = time.Since(began)
		}
		if took < time.Second || took > 6*time.Second {
			t.Errorf("took %s; the plan is 3.75 s", took)
		}
		wait.True(t, "a record", func() bool { return len(n.taken()) > 0 })
		if r := n.taken()[0]; r.End != conntrack.ConnectFailed || len(r.Failed) < 2 {
			t.Errorf("%+v", r)
		}
	})
}

// A connection that waits for an endpoint ends if its address becomes another Service's: its
// record names the Service that it began with. The client's next one is the other Service's.
func TestAddressOfAnotherServiceEndsTheHandshake(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.Backends[1].EchoTCP(t, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))) // nothing listens there
		asked := make(chan error, 1)
		go func() {
			_, err := lab.Client.Ask("tcp", vip4+":80")
			asked <- err
		}()
		wait.True(t, "it was refused", func() bool { return n.server.Stats().Kernel["refused"] > 0 })
		other := svc(vip4, func(s *corev1.Service) { s.Name = "other" }, at(lab.Backends[1].IPv4, 8080))
		for _, slice := range other.EndpointSlices {
			slice.Name, slice.Labels = "other-"+slice.Name, map[string]string{discoveryv1.LabelServiceName: "other"}
		}
		moved := svc("10.96.0.99", nil)
		moved.Services, moved.EndpointSlices = append(moved.Services, other.Services...), append(moved.EndpointSlices, other.EndpointSlices...)
		n.apply(moved)
		check.Error(t, <-asked, "refused")
		check.Equalf(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b2:8080", "the next one")
		wait.True(t, "records", func() bool { return len(n.taken()) == 2 })
		if r := n.taken(); r[0].End != conntrack.ConnectFailed || r[0].Port.Name.Name.Name != "web" || r[1].Port.Name.Name.Name != "other" {
			t.Errorf("%+v", r)
		}
	})
}

func TestMasquerade(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	lab.Backends[0].WitnessUDP(t, 8080)
	n := newNode(t, lab, nil)
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	for _, network := range []string{"tcp", "udp"} {
		said, err := askBy(lab.Client, network, vip4+":80")
		if err != nil || !strings.HasPrefix(said, "b1:8080 10.2.1.1:") {
			t.Errorf("%s: %q, %v", network, said, err)
		}
	}
}

// askBy asks an echo server by TCP or UDP.
func askBy(h *netns.Host, network, address string) (string, error) {
	if network == "tcp" {
		return h.Ask(network, address)
	}
	c, err := h.Dial(network, address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return question(c)
}

func question(c net.Conn) (string, error) {
	if _, err := c.Write([]byte("who?")); err != nil {
		return "", err
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 1<<16)
	n, err := c.Read(b)
	said, _, _ := strings.Cut(string(b[:n]), "\n")
	return said, err
}

func TestSessionFollowsItsEndpoint(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		for _, b := range lab.Backends {
			b.WitnessUDP(t, 8080)
		}
		n := newNode(t, lab, by)
		b1, b2 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)
		n.apply(svc(vip4, nil, b1))
		c := must.Get(lab.Client.Dial("udp", vip4+":80"))(t)
		defer c.Close()
		for range 5 {
			must.Equal(t, must.Get(question(c))(t), "b1:8080 "+c.LocalAddr().String())
		}
		n.apply(svc(vip4, nil, b2)) // A8.2
		if said, err := question(c); err != nil || !strings.HasPrefix(said, "b2:8080") {
			t.Fatalf("%q, %v", said, err)
		}
		wait.True(t, "a record", func() bool { return len(n.taken()) == 1 })
		if r := n.taken()[0]; r.End != conntrack.EndpointGone || r.DatagramsFromClient != 5 || r.DatagramsFromEndpoint != 5 || r.BytesFromClient != 20 || r.Protocol != service.UDP {
			t.Errorf("%+v", r)
		}
	})
}

func TestDatagramToClosedEndpointIsSentAgain(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.Backends[1].EchoUDP(t, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
		for range 10 {
			must.Equal(t, must.Get(askBy(lab.Client, "udp", vip4+":80"))(t), "b2:8080")
		}
	})
}

func TestSilentEndpoint(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.Backends[1].EchoTCP(t, 8080)
		n := newNode(t, lab, by)
		n.relay.options.Plan = hasty
		n.apply(svc(vip4, func(s *corev1.Service) { s.Annotations["sluice.dev/balancer"] = "random" },
			at(nobodyAt(t, lab, lab.Backends[0]), 8080), at(lab.Backends[1].IPv4, 8080)))
		for range 6 {
			must.Equal(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b2:8080")
		}
	})
}

// dropping returns a program for tcx that drops a protocol's packets.
func dropping(t *testing.T, protocol uint16) *ebpf.Program {
	t.Helper()
	const offset, next, drop = 16, -1, 2
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Apache-2.0", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, offset, asm.Word),
		asm.Mov.Imm(asm.R0, next),
		asm.JNE.Imm(asm.R2, int32(bpf.Wire(protocol)), "end"),
		asm.Mov.Imm(asm.R0, drop),
		asm.Return().WithSymbol("end"),
	}})
	must.OK(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// An endpoint that was given up answers late: it is told that nobody is there.
func TestLateAnswerIsRefused(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.EchoTCP(t, 8080)
		n := newNode(t, lab, by)
		n.relay.options.Plan = hasty
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
		mute := dropping(t, syscall.ETH_P_IP)
		// At the node's side: b1 forgets a connection if it cannot send its answer again itself.
		var l link.Link
		wire := lab.Node.Link(t, lab.Backends[0].Name()).Attrs().Index
		must.OK(t, lab.Node.Do(func() (err error) {
			l, err = link.AttachTCX(link.TCXOptions{Interface: wire, Program: mute, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
			return err
		}))
		// One of the two asks b1 first. The connection to b2 stays open, so that its flow knows b1's
		// answer whenever b1 sends that again: 7, 15 or 31 s after the SYN.
		for range 2 {
			c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
			defer c.Close()
			check.Equal(t, must.Get(netns.AskOn(c))(t), "b2:8080")
		}
		_ = l.Close()
		wait.For(t, "a late answer", 2*patience, func() error {
			if s := n.server.Stats(); s.Late == 0 {
				return fmt.Errorf("none of %+v", s)
			}
			return nil
		})
	})
}

func TestAnnotationLeavesPortToTheRelay(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, func(s *corev1.Service) { s.Annotations["sluice.dev/datapath"] = "relay" }, at(lab.Backends[0].IPv4, 8080)))
	var d bpf.KernelDestination
	var s bpf.KernelServed
	if n.server.kernel.Maps.Destinations.Iterate().Next(&d, &s) {
		t.Errorf("the kernel asks about %v", d)
	}
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	check.OK(t, must.Err(lab.Client.Ask("tcp", vip4+":80")))
}
