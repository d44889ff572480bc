package flow

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// mixer is a client that asks Services and their endpoint by few ports.
type mixer struct {
	client *netns.Host
	to     []netip.AddrPort // the last one is the endpoint
	server *net.TCPListener
	random *rand.Rand
	open   map[route]sides
	mixed
}

// route is a port of the client, and a number of to.
type route struct{ port, to int }

// sides are those of the client and of the endpoint.
type sides [2]*net.TCPConn

// mixed counts connections.
type mixed struct {
	made, services, held int // held: the client itself has the port in TIME-WAIT
	late, lost           int // took 5 ms; a SYN was lost
}

const (
	mixedPorts = 20
	late       = 5 * time.Millisecond
	lost       = 900 * time.Millisecond // less than the time after which a SYN is sent again
)

// newMixer returns a client, and listens at its endpoint, which a host has.
func newMixer(t *testing.T, client, host *netns.Host, endpoint netip.AddrPort) *mixer {
	t.Helper()
	l := must.Get(host.Listen("tcp", endpoint.String()))(t)
	t.Cleanup(func() { _ = l.Close() })
	must.OK(t, client.SetSysctl("net/ipv4/tcp_tw_reuse", "1"))
	return &mixer{client: client, server: l.(*net.TCPListener), random: rand.New(rand.NewPCG(rand.Uint64(), 0)), open: make(map[route]sides)}
}

// must connects, or ends the test.
func (m *mixer) must(t *testing.T, port int, to netip.AddrPort) sides {
	t.Helper()
	return m.mustFrom(t, m.client, at(m.client.IPv4, uint16(port)), to)
}

// mustFrom is must for any host and its address.
func (m *mixer) mustFrom(t *testing.T, host *netns.Host, from, to netip.AddrPort) (s sides) {
	t.Helper()
	must.OK(t, host.Do(func() (err error) {
		s, err = m.connect(from, to)
		return err
	}))
	return s
}

// connect connects in the thread's namespace, and returns both sides, or none if the client has that
// connection still. Each side hears the other one.
func (m *mixer) connect(from, to netip.AddrPort) (s sides, err error) {
	d := net.Dialer{
		Timeout:   patience,
		LocalAddr: net.TCPAddrFromAddrPort(from),
		Control: func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			return err
		},
	}
	began := time.Now()
	c, err := d.Dial("tcp", to.String())
	took := time.Since(began)
	if errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EADDRINUSE) {
		return s, nil
	} else if err != nil {
		return s, err
	}
	m.made++
	if took >= late {
		m.late++
	}
	if took >= lost {
		m.lost++
	}
	s[0] = c.(*net.TCPConn)
	_ = m.server.SetDeadline(time.Now().Add(patience))
	if err = say(s[0], m.random, func() (_ *net.TCPConn, err error) {
		s[1], err = m.server.AcceptTCP()
		return s[1], err
	}); err != nil {
		return s, err
	}
	return s, say(s[1], m.random, func() (*net.TCPConn, error) { return s[0], nil })
}

// say says a word, and compares it with what the other side hears.
func say(from *net.TCPConn, random *rand.Rand, other func() (*net.TCPConn, error)) error {
	word := fmt.Sprint(random.Uint64())
	if _, err := from.Write([]byte(word)); err != nil {
		return err
	}
	to, err := other()
	if err != nil {
		return err
	}
	_ = to.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 100)
	if n, err := to.Read(b); err != nil || string(b[:n]) != word {
		return fmt.Errorf("%q instead of %q: %w", b[:n], word, err)
	}
	return nil
}

// end ends a connection by FIN or RST of either side.
func (s sides) end(how int) error {
	first, last := s[how%2], s[1-how%2]
	if how >= 2 {
		_ = first.SetLinger(0)
	}
	_ = first.Close()
	_ = last.SetDeadline(time.Now().Add(patience))
	_, err := last.Read(make([]byte, 1))
	_ = last.Close()
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the end was not noticed: %w", err)
	}
	return nil
}

// run makes connections, and ends them, at random: so many, or until a time.
func (m *mixer) run(connections int, until time.Time) error {
	for m.made < connections && time.Now().Before(until) {
		r := route{45000 + m.random.IntN(mixedPorts), m.random.IntN(len(m.to))}
		s, is := m.open[r]
		var err error
		if is {
			delete(m.open, r)
			err = s.end(m.random.IntN(4))
		} else if s, err = m.connect(at(m.client.IPv4, uint16(r.port)), m.to[r.to]); err == nil && s[0] == nil {
			m.held++
		} else if err == nil {
			m.open[r] = s
			if r.to < len(m.to)-1 {
				m.services++
			}
		}
		if err != nil {
			return fmt.Errorf("connection %d, %s from %d to %s: %w", m.made, m.client.Name(), r.port, m.to[r.to], err)
		}
	}
	for _, s := range m.open {
		if err := s.end(m.random.IntN(4)); err != nil {
			return err
		}
	}
	return nil
}

// newMixers returns clients with an endpoint each: another host, and endpoints that ask each other and
// themselves. change gets each one's Services.
func newMixers(t *testing.T, lab *netns.Lab, change func(service.Change)) (list []*mixer) {
	t.Helper()
	one, two := lab.Backends[0], lab.Backends[1]
	for i, pair := range [][2]*netns.Host{{lab.Client, one}, {lab.Client, two}, {two, one}, {one, one}} {
		endpoint, nodePort := at(pair[1].IPv4, uint16(8080+i)), uint16(30080+i)
		m := newMixer(t, pair[0], pair[1], endpoint)
		for s := range 2 {
			vip := fmt.Sprint("10.96.0.", 10+2*i+s)
			m.to = append(m.to, netip.MustParseAddrPort(vip+":80"))
			change(named(fmt.Sprint("mixed-", i, "-", s), svc(vip, func(o *corev1.Service) {
				if s == 0 {
					o.Spec.Type, o.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, int32(nodePort)
				}
			}, endpoint)))
		}
		m.to = append(m.to, at(lab.Node.IPv4, nodePort), endpoint)
		list = append(list, m)
	}
	return list
}

// mix has all clients make connections together, and returns what became of them.
func mix(t *testing.T, list []*mixer) (all mixed) {
	t.Helper()
	connections, most := 600, time.Hour
	if full() {
		connections, most = 250_000, 15*time.Minute
	}
	began := time.Now()
	var running sync.WaitGroup
	for _, m := range list {
		running.Go(func() {
			check.OK(t, m.client.Do(func() error { return m.run(connections/len(list), began.Add(most)) }))
		})
	}
	running.Wait()
	for _, m := range list {
		all = mixed{all.made + m.made, all.services + m.services, all.held + m.held, all.late + m.late, all.lost + m.lost}
	}
	t.Logf("%d connections, %d to Services, in %v: %d took %v and more, %d lost a SYN; %d times the client held the port",
		all.made, all.services, time.Since(began).Round(time.Millisecond), all.late, late, all.lost, all.held)
	return all
}

// TestClientsMixServicesAndEndpoints: clients that ask Services with one endpoint, and that endpoint
// itself, from few ports, get answers from where they have asked, whichever comes first and however it
// ends. The kernel's NAT does the same, for comparison of the delays; with SLUICE_TEST_FULL=1, a million
// connections of kernel flows.
func TestClientsMixServicesAndEndpoints(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		t.Run(fmt.Sprint("hidden=", hidden, "/nat"), func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 2)
			list := newMixers(t, lab, func(service.Change) {})
			translate(t, lab, list, hidden)
			mix(t, list)
		})
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 2)
			n := newNode(t, lab, func(o *Options) {
				if by(o); full() {
					o.MaxFlows = 1 << 17
				}
			})
			n.config.MasqueradeAll = hidden
			list := newMixers(t, lab, n.apply)
			for i, m := range list {
				name := service.Name{Namespace: "test", Name: fmt.Sprint("mixed-", i, "-0")}
				must.OK(t, n.server.paths[service.TCP].Bind(policy.Opening{
					Destination: service.Destination{Addr: lab.Node.IPv4, Port: m.to[2].Port(), Protocol: service.TCP},
					Name:        service.PortName{Name: name, Port: "tcp", Protocol: service.TCP},
					Kind:        service.NodePort, Action: policy.Accept,
				}))
			}
			got := mix(t, list)
			most := got.made / 4 // a busy machine may answer as late
			if full() {
				most = got.made / 10_000
			}
			if got.lost > most {
				t.Errorf("hidden %v: %+v", hidden, got)
			}
			n.finish()
			records := n.taken()
			check.Equalf(t, len(records), got.services, "hidden %v: records of %d connections", hidden, got.services)
			for _, r := range records {
				if r.Path != conntrack.Kernel || r.Port == nil {
					t.Errorf("%+v", r)
				}
			}
		})
	}
}

// translate has the kernel's NAT do what a node does for the clients.
func translate(t *testing.T, lab *netns.Lab, list []*mixer, hidden bool) {
	t.Helper()
	var to strings.Builder
	for _, m := range list {
		endpoint := m.to[len(m.to)-1]
		for _, a := range m.to[:len(m.to)-1] {
			fmt.Fprintf(&to, "ip daddr %s tcp dport %d dnat to %s\n", a.Addr(), a.Port(), endpoint)
		}
	}
	all := ""
	if hidden {
		all = "ct status dnat masquerade"
	}
	lab.Node.NFT(t, fmt.Sprintf(`table ip nat {
chain pre { type nat hook prerouting priority dstnat
%s}
chain post { type nat hook postrouting priority srcnat
%s
ct status dnat ct original ip daddr %s masquerade
ip saddr %[4]s ip daddr %[4]s masquerade
}
}`, to.String(), all, lab.Node.IPv4, lab.Backends[0].IPv4))
}

// forgets waits until no flow has a way back of TCP.
func (n *node) forgets(from, to netip.AddrPort) {
	n.t.Helper()
	back := bpf.KernelTuple{Src: bpf.AddressOf(from.Addr()), Sport: bpf.Wire(from.Port()), Dst: bpf.AddressOf(to.Addr()), Dport: bpf.Wire(to.Port()), Protocol: unix.IPPROTO_TCP}
	wait.Equal(n.t, "the flow with its way back", patience, 0, func() bpf.Reference { return n.server.kernel.Index.Find(&back) })
}

// A client's own connection to an endpoint has another port there by a flow that is over. One that
// hides the client leaves it that port, and takes another one itself.
func TestHiddenClientsOwnConnectionGoesOn(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		endpoint := at(lab.Backends[0].IPv4, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, endpoint))
		m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
		const port = 45000
		vip := netip.MustParseAddrPort(vip4 + ":80")
		shown := m.must(t, port, vip)
		own := m.must(t, port, endpoint)
		if seen := own[1].RemoteAddr().(*net.TCPAddr).Port; seen == port {
			t.Fatalf("the endpoint sees port %d of both", seen)
		}
		must.OK(t, shown.end(0))
		n.forgets(endpoint, at(lab.Client.IPv4, port))
		n.config.MasqueradeAll = true
		n.apply(svc(vip4, nil, endpoint))
		hidden := m.must(t, port, vip)
		if seen := hidden[1].RemoteAddr().(*net.TCPAddr).IP; seen.Equal(lab.Client.IPv4.AsSlice()) {
			t.Fatalf("the endpoint sees %v", seen)
		}
		must.OK(t, own.end(2))
		must.OK(t, hidden.end(0))
	})
}

// A connection of a client's own to an endpoint answers one SYN of a flow that has its port: the flow gets
// another one. The next flows, of any Service, do not ask there again.
func TestFlowsAvoidAClientsOwnConnection(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		endpoint := at(lab.Backends[0].IPv4, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, endpoint))
		n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
		m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
		const port = 45000
		own := m.must(t, port, endpoint)
		for i := range 6 {
			s := m.must(t, port, netip.MustParseAddrPort([]string{vip4, "10.96.0.11"}[i%2]+":80"))
			met := lab.Backends[0].Counter(t, "netstat", "TcpExt:", "TCPSYNChallenge")
			if seen := s[1].RemoteAddr().(*net.TCPAddr).Port; seen == port || met != 1 {
				t.Errorf("connection %d: the endpoint sees port %d, and flows have met the client's own connection %d times", i, seen, met)
			}
			must.OK(t, s.end(2))
		}
		must.OK(t, own.end(0))
	})
}

// A hidden client keeps its port until a flow meets a connection in TIME-WAIT there, whose numbers are
// higher. The endpoint answers no other such SYN for half a second: the next flows have another port at once.
func TestHiddenClientsAvoidTimeWait(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		must.OK(t, lab.Client.SetSysctl("net/ipv4/tcp_timestamps", "0")) // else a later one accepts lower numbers
		endpoint := at(lab.Backends[0].IPv4, 8080)
		n := newNode(t, lab, by)
		n.config.MasqueradeAll = true
		m := newMixer(t, lab.Client, lab.Backends[0], endpoint)
		const port, services = 45000, 24
		moved := 0
		for i := range services {
			vip := fmt.Sprint("10.96.0.", 10+i)
			n.apply(named(fmt.Sprint("service-", i), svc(vip, nil, endpoint)))
			s := m.must(t, port, netip.MustParseAddrPort(vip+":80"))
			if s[1].RemoteAddr().(*net.TCPAddr).Port != port {
				moved++
			} else if moved > 0 {
				t.Errorf("connection %d has the client's port, where another one met TIME-WAIT", i)
			}
			must.OK(t, s.end(1))
			n.forgets(endpoint, at(netip.MustParseAddr("10.2.1.1"), port))
		}
		if moved == 0 {
			t.Errorf("%d connections have met no connection in TIME-WAIT", services)
		}
	})
}
