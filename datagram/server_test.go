package datagram

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

const (
	vip4 = "10.96.0.10"
	vip6 = "fd00:96::10"
)

func TestServesFromNearAndFar(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	lab.Backends[1].EchoUDP(t, 5300)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300), at(lab.Backends[1].IPv4, 5300)))
	n.apply(svc("six", vip6, nil, at(lab.Backends[0].IPv6, 5300)))
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, vip := range []string{vip4 + ":53", "[" + vip6 + "]:53"} {
			// A connected socket receives only from the address that it sent to.
			got, err := ask(client(t, from, vip), "hello", patience)
			if err != nil || !strings.HasSuffix(got, "\nhello") {
				t.Errorf("%s asks %s: %q, %v", from.Name(), vip, got, err)
			}
		}
	}
	n.stop()
	if ends := n.records.Ends(); ends[conntrack.Shutdown] != 4 || len(ends) != 1 {
		t.Errorf("records end %v, want shutdown 4 times", ends)
	}
	for _, r := range n.records.All() {
		if r.DatagramsFromClient != 1 || r.DatagramsFromEndpoint != 1 || r.BytesFromClient != 5 || r.FirstByte == 0 || r.Attempts != 1 || r.Endpoint == nil {
			t.Errorf("record %+v", r)
		}
	}
}

// Datagrams of every size keep their boundaries.
func TestSizes(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("six", vip6, nil, at(lab.Backends[0].IPv6, 5300)))
	name := "b1:5300\n"
	for _, vip := range []string{vip4 + ":53", "[" + vip6 + "]:53"} {
		c := client(t, lab.Client, vip)
		for _, size := range []int{0, 1, 1472, 9000, 65507 - len(name)} {
			p := bytes.Repeat([]byte{'x'}, size)
			got, err := ask(c, string(p), patience)
			if err != nil || got != name+string(p) {
				t.Errorf("%d bytes to %s: %d bytes back, %v", size, vip, len(got), err)
			}
		}
	}
}

// The largest datagram arrives in one piece.
func TestLargestDatagram(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	server := must.Get(lab.Backends[0].ListenPacket("udp", ":5300"))(t)
	defer server.Close()
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	p := bytes.Repeat([]byte{'x'}, 65507)
	must.OK(t, must.Err(c.Write(p)))
	buf := make([]byte, 1<<16)
	size, from, err := server.ReadFrom(buf)
	if err != nil || !bytes.Equal(buf[:size], p) {
		t.Fatalf("%d bytes, %v", size, err)
	}
	must.OK(t, must.Err(server.WriteTo(p, from)))
	if size, err = c.Read(buf); err != nil || !bytes.Equal(buf[:size], p) {
		t.Fatalf("%d bytes, %v", size, err)
	}
}

// A client's datagrams arrive in order, even if they come faster than they are read, in
// batches and GSO batches.
func TestOrder(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	server := must.Get(lab.Backends[0].ListenPacket("udp", ":5300"))(t)
	defer server.Close()
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	const rounds, burst = 50, 40
	buf := make([]byte, 2048)
	must.OK(t, server.SetReadDeadline(time.Now().Add(patience)))
	for i := range rounds {
		for j := range burst {
			size := []int{1000, 1000, 1000, 17, 1400}[j%5]
			must.OK(t, must.Err(fmt.Fprintf(c, "%0*d", size, i*burst+j)))
		}
		for j := range burst {
			size, from, err := server.ReadFrom(buf)
			must.OK(t, err)
			want := fmt.Sprintf("%0*d", []int{1000, 1000, 1000, 17, 1400}[j%5], i*burst+j)
			if string(buf[:size]) != want {
				t.Fatalf("got %d bytes ...%s, want %d bytes ...%s", size, buf[max(0, size-8):size], len(want), want[len(want)-8:])
			}
			must.OK(t, must.Err(server.WriteTo(buf[:size], from)))
		}
		for j := range burst {
			size := must.Get(c.Read(buf))(t)
			want := fmt.Sprintf("%0*d", []int{1000, 1000, 1000, 17, 1400}[j%5], i*burst+j)
			if string(buf[:size]) != want {
				t.Fatalf("back: got %d bytes ...%s, want %d", size, buf[max(0, size-8):size], len(want))
			}
		}
	}
	check.Equalf(t, n.server.Stats().Sessions.Load(), 1, "sessions (A8.9)")
}

// Answers that an endpoint sends in GSO batches arrive one by one and in order, before
// and after the session's socket enables GRO.
func TestAnswersInTrains(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	server := must.Get(lab.Backends[0].ListenPacket("udp", ":5300"))(t)
	defer server.Close()
	raw := must.Get(server.(*net.UDPConn).SyscallConn())(t)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	out := sys.NewOutbox(32)
	buf := make([]byte, 2048)
	for round := range 30 {
		must.OK(t, must.Err(c.Write([]byte("more"))))
		_, from, err := server.ReadFrom(buf)
		must.OK(t, err)
		to := netip.MustParseAddrPort(from.String())
		var want []string
		for i := range 30 {
			size := []int{1000, 1000, 1000, 17, 1400, 1400}[i%6]
			if round%2 == 0 {
				size = 1200
			}
			want = append(want, fmt.Sprintf("%0*d", size, 100*round+i))
			out.Append(to, []byte(want[i]), 0, true)
		}
		must.OK(t, raw.Control(func(fd uintptr) {
			check.Equal(t, out.Send(int(fd)), 0)
		}))
		for i := range want {
			if size, err := c.Read(buf); err != nil || string(buf[:size]) != want[i] {
				t.Fatalf("round %d, answer %d: %d bytes, %v; want %d bytes", round, i, size, err, len(want[i]))
			}
		}
	}
}

// A dead endpoint costs a client no datagram: another endpoint gets them. Few sessions
// try the dead endpoint: later ones skip it.
func TestPromise1_ClosedEndpointCostsNoDatagram(t *testing.T) {
	lab := netns.NewLab(t, 3)
	n := newNode(t, lab, nil)
	server := must.Get(lab.Backends[2].ListenPacket("udp", ":5300"))(t)
	defer server.Close()
	n.apply(svc("dns", vip4, nil, at(lab.Backends[0].IPv4, 5300), at(lab.Backends[1].IPv4, 5300), at(lab.Backends[2].IPv4, 5300)))
	buf := make([]byte, 2048)
	start := time.Now()
	for i := range 60 {
		c := client(t, lab.Client, vip4+":53")
		for j := range 5 {
			must.OK(t, must.Err(fmt.Fprintf(c, "%d/%d", i, j)))
		}
		must.OK(t, server.SetReadDeadline(time.Now().Add(patience)))
		for j := range 5 {
			size, _, err := server.ReadFrom(buf)
			if want := fmt.Sprintf("%d/%d", i, j); err != nil || string(buf[:size]) != want {
				t.Fatalf("got %q, %v, want %q", buf[:size], err, want)
			}
		}
	}
	if s := n.server.Stats(); s.Resent.Load() == 0 || s.Lost.Load() != 0 {
		t.Errorf("stats %+v: want some resent and none lost", s)
	}
	took := time.Since(start)
	n.stop()
	failed := 0
	for _, r := range n.records.All() {
		failed += len(r.Failed)
		for _, a := range r.Failed {
			check.Equalf(t, a.Error, conntrack.DialRefused, "attempt failed")
		}
	}
	// Two endpoints, each tried again after half a second.
	if most := 4 + 4*int(took/time.Second); failed == 0 || failed > most {
		t.Errorf("%d attempts failed in %v, want 1 to %d", failed, took, most)
	}
}

// The new endpoint serves the client's existing socket within 100 ms of the change
// (A8.2, A8.4, A8.5, A8.6).
func TestEndpointCycles(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	one, two := lab.Backends[0], lab.Backends[1]
	one.EchoUDP(t, 5300)
	one.EchoUDP(t, 5301)
	two.EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, nil, at(one.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	served := func(want string) {
		t.Helper()
		start := time.Now()
		got, err := ask(c, "q", patience)
		if err != nil || got != want+"\nq" {
			t.Fatalf("%q, %v; want an answer of %s", got, err, want)
		}
		if took := time.Since(start); took > 100*time.Millisecond {
			t.Logf("%s answered after %v", want, took)
		}
	}
	served("b1:5300")
	served("b1:5300")
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(two.IPv4, 5300))})
	served("b2:5300")
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(one.IPv4, 5301))})
	served("b1:5301")
	// The same address on another port is another endpoint (A8.5).
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(one.IPv4, 5300))})
	served("b1:5300")
	// None, then one (A8.6).
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4)})
	check.ErrorIsf(t, must.Err(ask(c, "q", patience)), syscall.ECONNREFUSED, "no endpoint")
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(two.IPv4, 5300))})
	served("b2:5300")
	// More endpoints do not move it (A8.9).
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(one.IPv4, 5300), at(two.IPv4, 5300), at(one.IPv4, 5301))})
	for range 5 {
		served("b2:5300")
	}
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.EndpointGone: 4, conntrack.Shutdown: 1})
}

// An endpoint that had answered is closed before the Service changes: its session ends,
// and another endpoint serves the same client socket.
func TestEndpointIsClosedAfterItAnswered(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	one, two := lab.Backends[0], lab.Backends[1]
	echo := one.EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, nil, at(one.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	for range 3 {
		must.Equal(t, must.Get(ask(c, "q", patience))(t), "b1:5300\nq")
	}
	two.EchoUDP(t, 5300)
	n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, at(one.IPv4, 5300), at(two.IPv4, 5300))})
	echo.Close()
	wait.True(t, "the other one answers", func() bool {
		got, err := ask(c, "again", 100*time.Millisecond)
		return err == nil && got == "b2:5300\nagain"
	})
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.EndpointGone: 1, conntrack.Shutdown: 1})
}

// A terminating endpoint that still serves keeps its sessions (A8.3). They end when it
// stops serving.
func TestTerminatingKeepsSessions(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	one, two := lab.Backends[0], lab.Backends[1]
	one.EchoUDP(t, 5300)
	two.EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, nil, at(one.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	served := func(c net.Conn, want string) {
		t.Helper()
		if got, err := ask(c, "q", patience); err != nil || got != want+"\nq" {
			t.Fatalf("%q, %v; want an answer of %s", got, err, want)
		}
	}
	served(c, "b1:5300")
	condition := func(ready, serving, terminating bool) {
		list := endpointSlices("dns", vip4, at(one.IPv4, 5300), at(two.IPv4, 5300))
		e := &list[0].Endpoints[0].Conditions
		e.Ready, e.Serving, e.Terminating = &ready, &serving, &terminating
		n.apply(service.Change{EndpointSlices: list})
	}
	condition(false, true, true)
	served(c, "b1:5300")
	served(client(t, lab.Client, vip4+":53"), "b2:5300")
	condition(false, false, true)
	served(c, "b2:5300")
}

func TestResponsesEndASession(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, map[string]string{"udp-responses": "1"}, at(lab.Backends[0].IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	for range 100 {
		must.OK(t, must.Err(ask(c, "q", patience)))
	}
	wait.True(t, "no session", func() bool { return n.server.Stats().Sessions.Load() == 0 })
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.Responses: 100})
}

// Idle sessions end after the timeouts of the kernel's connection tracking (A8.8).
func TestIdleSessionsEnd(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, map[string]string{"udp-timeout": "50ms"}, at(lab.Backends[0].IPv4, 5300)))
	asked := 0
	for range 20 {
		c := client(t, lab.Client, vip4+":53")
		wait.True(t, "an answer", func() bool { // on a busy machine the session may end before
			asked++
			_, err := ask(c, "q", time.Second)
			return err == nil
		})
	}
	wait.True(t, "no session", func() bool { return n.server.Stats().Sessions.Load() == 0 })
	n.stop()
	if ends := n.records.Ends(); ends[conntrack.Idle] < 20 || ends[conntrack.Idle] > asked || len(ends) != 1 {
		t.Errorf("records end %v, of %d datagrams", ends, asked)
	}
}

// A flood of clients evicts sessions of its own service only.
func TestPromise8_FloodDrivesOutItsOwnSessions(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, func(o *Options) { o.MaxSessions = 200 })
	lab.Backends[0].EchoUDP(t, 5300)
	lab.Backends[1].EchoUDP(t, 5300)
	n.apply(svc("flooded", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("quiet", "10.96.0.11", nil, at(lab.Backends[1].IPv4, 5300)))
	var quiet []net.Conn
	for range 20 {
		c := client(t, lab.Client, "10.96.0.11:53")
		quiet = append(quiet, c)
		must.OK(t, must.Err(ask(c, "q", patience)))
	}
	pc := must.Get(lab.Client.ListenPacket("udp", ":0"))(t)
	defer pc.Close()
	for range 1000 {
		c, err := lab.Client.Dial("udp", vip4+":53")
		must.OK(t, err)
		_, err = ask(c, "q", patience)
		_ = c.Close()
		must.OK(t, err)
	}
	s := n.server.Stats()
	if s.Sessions.Load() > 200 || s.Lost.Load() != 0 {
		t.Errorf("stats %+v", s)
	}
	for _, c := range quiet {
		check.OK(t, must.Err(ask(c, "q", patience)))
	}
	n.stop()
	evicted := map[string]int{}
	for _, r := range n.records.All() {
		if r.End == conntrack.Evicted {
			evicted[r.Port.Name.Name.Name]++
		}
	}
	if evicted["flooded"] < 700 || len(evicted) != 1 {
		t.Errorf("evicted %v, want 700 of flooded or more", evicted)
	}
}

// The limit of a Service's sessions counts all of its ports, and no other Service's.
func TestServiceBoundCountsAllPorts(t *testing.T) {
	const most = 20
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *Options) { o.MaxServiceSessions = most })
	lab.Backends[0].EchoUDP(t, 5300)
	c := svc("two", vip4, nil, at(lab.Backends[0].IPv4, 5300))
	ports := &c.Services[0].Spec.Ports
	(*ports)[0].Name = "a"
	*ports = append(*ports, corev1.ServicePort{Name: "b", Port: 54, Protocol: corev1.ProtocolUDP})
	a, b := "a", "b"
	slice := c.EndpointSlices[0]
	second := slice.Ports[0]
	slice.Ports[0].Name, second.Name = &a, &b
	slice.Ports = append(slice.Ports, second)
	n.apply(c)
	n.apply(svc("other", "10.96.0.11", nil, at(lab.Backends[0].IPv4, 5300)))
	for i := range 120 {
		to := []string{vip4 + ":53", vip4 + ":54"}[i%2]
		if i < 10 {
			to = "10.96.0.11:53"
		}
		must.OK(t, must.Err(ask(client(t, lab.Client, to), "q", patience)))
	}
	if s := n.server.Stats(); s.Sessions.Load() > most+10 {
		t.Errorf("%d sessions of a Service with two ports and 10 of another; want at most %d", s.Sessions.Load(), most+10)
	}
	n.stop()
	evicted := map[string]int{}
	for _, r := range n.records.All() {
		if r.End == conntrack.Evicted {
			evicted[r.Port.Name.Name.Name]++
		}
	}
	if evicted["two"] < 110-most || len(evicted) != 1 {
		t.Errorf("evicted %v, want %d of two or more", evicted, 110-most)
	}
}

// A server of the host that has the service's port on all addresses neither receives
// clients' datagrams nor prevents replies (F4).
func TestHostsWildcardServerStandsInNobodysWay(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	var hosts []net.PacketConn
	for _, address := range []string{"0.0.0.0:53", "[::]:53"} {
		network := map[bool]string{true: "udp6", false: "udp4"}[address[0] == '[']
		pc := must.Get(lab.Node.ListenPacket(network, address))(t)
		defer pc.Close()
		hosts = append(hosts, pc)
	}
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("six", vip6, nil, at(lab.Backends[0].IPv6, 5300)))
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, vip := range []string{vip4 + ":53", "[" + vip6 + "]:53"} {
			c := client(t, from, vip)
			for _, size := range []int{0, 5, 1001, 9000, 60000} {
				p := strings.Repeat("y", size)
				if got, err := ask(c, p, patience); err != nil || got != "b1:5300\n"+p {
					t.Errorf("%s asks %s with %d bytes: %d bytes, %v", from.Name(), vip, size, len(got), err)
				}
			}
		}
	}
	if got := n.server.Stats().Conflicts.Load(); got == 0 {
		t.Error("no conflict was found: the test does not test it")
	}
	for _, pc := range hosts {
		raw := must.Get(pc.(*net.UDPConn).SyscallConn())(t)
		must.OK(t, raw.Control(func(fd uintptr) {
			if size, from, err := syscall.Recvfrom(int(fd), make([]byte, 10), syscall.MSG_DONTWAIT); err != syscall.EAGAIN {
				t.Errorf("the host's server got %d bytes from %v, %v", size, from, err)
			}
		}))
	}
}

// bindNodePort serves a Service with a node port, and returns that.
func bindNodePort(t *testing.T, lab *netns.Lab, n *node) service.Destination {
	t.Helper()
	lab.Backends[0].EchoUDP(t, 5300)
	change := svc("np", vip4, nil, at(lab.Backends[0].IPv4, 5300))
	change.Services[0].Spec.Type = "NodePort"
	change.Services[0].Spec.Ports[0].NodePort = 30053
	n.apply(change)
	d := service.Destination{Addr: lab.Node.IPv4, Port: 30053, Protocol: service.UDP}
	must.OK(t, lab.Node.Do(func() error { return n.server.Bind(policy.Opening{Destination: d, Action: policy.Accept}) }))
	return d
}

// A destination with a socket of its own, such as a node port.
func TestBoundDestination(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	d := bindNodePort(t, lab, n)
	to := netip.AddrPortFrom(d.Addr, d.Port).String()
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		if got, err := ask(client(t, from, to), "q", patience); err != nil || got != "b1:5300\nq" {
			t.Errorf("%s: %q, %v", from.Name(), got, err)
		}
	}
	// A port of another program stays with that program.
	taken := service.Destination{Addr: lab.Node.IPv4, Port: 30054, Protocol: service.UDP}
	pc := must.Get(lab.Node.ListenPacket("udp4", ":30054"))(t)
	defer pc.Close()
	if err := lab.Node.Do(func() error { return n.server.Bind(policy.Opening{Destination: taken, Action: policy.Accept}) }); !InUse(err) {
		t.Errorf("bind to a port in use: %v", err)
	}
	n.server.Unbind(d)
	c := client(t, lab.Client, to)
	wait.True(t, "a refusal", func() bool {
		_, err := ask(c, "q", 100*time.Millisecond)
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}

// When the proxy ends, the sessions of bound destinations end for that reason too.
func TestSessionsOfBoundDestinationsEndWithTheProxy(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	bindNodePort(t, lab, n)
	for _, to := range []string{"10.1.0.1:30053", vip4 + ":53"} {
		check.OKf(t, must.Err(ask(client(t, lab.Client, to), "q", patience)), "%s", to)
	}
	n.stop()
	if ends := n.records.Ends(); ends[conntrack.Shutdown] != 2 || len(ends) != 1 {
		t.Errorf("records end %v, want shutdown twice", ends)
	}
}
