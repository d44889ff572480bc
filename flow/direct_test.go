package flow

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// mixed is a client that asks Services and their endpoint by few ports.
type mixed struct {
	t      *testing.T
	lab    *netns.Lab
	server net.Listener
	sides  map[string][2]net.Conn // open connections, by port and destination
}

// connect connects from a port, and returns both sides, or nil if the client has that connection
// still.
func (m *mixed) connect(port int, to string) (sides [2]net.Conn) {
	m.t.Helper()
	c, err := m.lab.Client.Dialer(&net.Dialer{
		Timeout:   patience,
		LocalAddr: &net.TCPAddr{IP: m.lab.Client.IPv4.AsSlice(), Port: port},
		Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			return err
		},
	}, "tcp", to)
	if errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EADDRINUSE) {
		return sides
	}
	must.OKf(m.t, err, "from %d to %s", port, to)
	_ = c.SetDeadline(time.Now().Add(patience))
	word := fmt.Sprint(port, to, rand.Uint64())
	must.OKf(m.t, must.Err(c.Write([]byte(word))), "from %d to %s", port, to)
	s, err := m.server.Accept()
	must.OKf(m.t, err, "from %d to %s", port, to)
	b := make([]byte, 100)
	if n, err := s.Read(b); err != nil || string(b[:n]) != word {
		m.t.Fatalf("from %d to %s: %q, %v", port, to, b[:n], err)
	}
	return [2]net.Conn{c, s}
}

// end ends a connection in one of several ways.
func (m *mixed) end(sides [2]net.Conn, how int) {
	m.t.Helper()
	first, last := sides[how%2], sides[1-how%2]
	if how >= 2 {
		_ = first.(*net.TCPConn).SetLinger(0)
	}
	_ = first.Close()
	_ = last.SetDeadline(time.Now().Add(patience))
	if _, err := last.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		m.t.Fatalf("the end was not noticed: %v", err)
	}
	_ = last.Close()
}

// Clients that ask two Services with one endpoint, and that endpoint itself, from few ports, get
// each answer from the address that they asked, in any order and after any kind of end.
func TestClientsMixServicesAndEndpoints(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 1)
			server, err := lab.Backends[0].Listen("tcp", ":8080")
			must.OK(t, err)
			defer server.Close()
			_ = server.(*net.TCPListener).SetDeadline(time.Now().Add(10 * patience))
			endpoint := at(lab.Backends[0].IPv4, 8080)
			n := newNode(t, lab, by)
			n.config.MasqueradeAll = hidden
			n.apply(svc(vip4, nil, endpoint))
			n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
			m := &mixed{t: t, lab: lab, server: server, sides: make(map[string][2]net.Conn)}
			slow, made, services := 0, 0, 0
			const ports = 20
			for range 600 {
				port, to := 45000+rand.IntN(ports), []string{vip4 + ":80", "10.96.0.11:80", endpoint.String()}[rand.IntN(3)]
				key := fmt.Sprint(port, " ", to)
				if sides, is := m.sides[key]; is {
					delete(m.sides, key)
					m.end(sides, rand.IntN(4))
					continue
				}
				began := time.Now()
				sides := m.connect(port, to)
				if sides[0] == nil {
					continue // the client itself has it in TIME-WAIT
				}
				if time.Since(began) > 900*time.Millisecond {
					slow++
				}
				made++
				if to != endpoint.String() {
					services++
				}
				m.sides[key] = sides
			}
			for _, sides := range m.sides {
				m.end(sides, rand.IntN(4))
			}
			t.Logf("hidden %v: %d connections, %d to Services, %d took a second and more", hidden, made, services, slow)
			// A SYN is lost where an endpoint has the port in TIME-WAIT.
			if slow > made/4 {
				t.Errorf("hidden %v: %d of %d connections took a second and more", hidden, slow, made)
			}
			n.finish()
			records := n.taken()
			if len(records) != services {
				t.Errorf("hidden %v: %d records of %d connections", hidden, len(records), services)
			}
			for _, r := range records {
				if r.Path != conntrack.Kernel || r.Port == nil {
					t.Errorf("%+v", r)
				}
			}
		})
	}
}

// A client's own connection to an endpoint keeps the port that a flow, now over, made it take. A new
// flow that hides the client takes another port.
func TestHiddenClientsOwnConnectionGoesOn(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		server, err := lab.Backends[0].Listen("tcp", ":8080")
		must.OK(t, err)
		defer server.Close()
		endpoint := at(lab.Backends[0].IPv4, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, endpoint))
		m := &mixed{t: t, lab: lab, server: server}
		const port = 45000
		shown := m.connect(port, vip4+":80")
		own := m.connect(port, endpoint.String())
		if seen := own[1].RemoteAddr().(*net.TCPAddr).Port; seen == port {
			t.Fatalf("the endpoint sees port %d of both", seen)
		}
		m.end(shown, 0)
		wait.For(t, "the first connection's flow is gone", patience, func() error {
			if r := n.server.kernel.Index.Find(&bpf.KernelTuple{
				Src: bpf.AddressOf(endpoint.Addr()), Sport: bpf.Wire(endpoint.Port()), Dst: bpf.AddressOf(lab.Client.IPv4), Dport: bpf.Wire(port), Protocol: unix.IPPROTO_TCP,
			}); r != 0 {
				return fmt.Errorf("flow %d has its way back", r.Flow())
			}
			return nil
		})
		n.config.MasqueradeAll = true
		n.apply(svc(vip4, nil, endpoint))
		hidden := m.connect(port, vip4+":80")
		if seen := hidden[1].RemoteAddr().(*net.TCPAddr).IP; seen.Equal(lab.Client.IPv4.AsSlice()) {
			t.Fatalf("the endpoint sees %v", seen)
		}
		m.end(own, 2)
		m.end(hidden, 0)
	})
}
