package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/must"
)

// Echo is a server that answers with its own name, so that a test's assertions
// read like a routing table.
type Echo struct {
	// Name is the host's name and the port: "b1:8080".
	Name string

	witness bool // adds the peer's address to the name

	mu     sync.Mutex
	peers  []netip.AddrPort // addresses of clients, in order; guarded by mu
	conns  map[net.Conn]struct{}
	closed bool
	close  func()
}

// EchoTCP listens on the port on all of the host's addresses of both families. It
// sends each client its name and a newline, then echoes what it reads and passes a
// half-close back. It ends with the test.
func (h *Host) EchoTCP(t testing.TB, port uint16) *Echo {
	t.Helper()
	return h.EchoTCPAt(t, fmt.Sprintf(":%d", port))
}

// EchoTCP serves at all backends.
func (lab *Lab) EchoTCP(t testing.TB, port uint16) {
	for _, b := range lab.Backends {
		b.EchoTCP(t, port)
	}
}

// EchoTCPAt is EchoTCP on one address.
func (h *Host) EchoTCPAt(t testing.TB, address string) *Echo {
	t.Helper()
	return h.serve(t, address, false)
}

// WitnessTCP is EchoTCP whose servers also send the address that they see, after
// their name and a space: "pod-1:8080 10.1.0.2:43210".
func (h *Host) WitnessTCP(t testing.TB, port uint16) *Echo {
	t.Helper()
	return h.serve(t, fmt.Sprintf(":%d", port), true)
}

// WitnessTCPAt is WitnessTCP on one address.
func (h *Host) WitnessTCPAt(t testing.TB, address string) *Echo {
	t.Helper()
	return h.serve(t, address, true)
}

// Accept calls serve for each connection, until the listener is closed.
func Accept(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil { // else the client went away before accept
			serve(c)
		}
	}
}

// ServeTCP serves each connection to an address with a goroutine, and closes it then. It
// accepts none after the test.
func (h *Host) ServeTCP(t testing.TB, address string, serve func(*net.TCPConn)) {
	t.Helper()
	l, err := h.Listen("tcp", address)
	must.OKf(t, err, "%s", h.Name())
	t.Cleanup(func() { _ = l.Close() })
	go Accept(l, func(c net.Conn) {
		go func() {
			defer c.Close()
			serve(c.(*net.TCPConn))
		}()
	})
}

func (h *Host) serve(t testing.TB, address string, witness bool) *Echo {
	t.Helper()
	l, err := h.Listen("tcp", address)
	must.OKf(t, err, "%s", h.Name())
	name := fmt.Sprintf("%s:%d", h.Name(), l.Addr().(*net.TCPAddr).Port)
	e := &Echo{Name: name, witness: witness, conns: map[net.Conn]struct{}{}}
	var served sync.WaitGroup
	served.Add(1)
	go func() {
		defer served.Done()
		e.serveTCP(l, &served)
	}()
	e.close = sync.OnceFunc(func() {
		_ = l.Close()
		e.mu.Lock()
		e.closed = true
		for c := range e.conns {
			_ = c.Close()
		}
		e.mu.Unlock()
		served.Wait()
	})
	t.Cleanup(e.close)
	return e
}

// Close stops the server before the test ends: it closes the port and its
// connections.
func (e *Echo) Close() { e.close() }

// Peers returns the clients' addresses, in the order of their connections.
func (e *Echo) Peers() []netip.AddrPort {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]netip.AddrPort(nil), e.peers...)
}

func (e *Echo) serveTCP(l net.Listener, served *sync.WaitGroup) {
	Accept(l, func(c net.Conn) {
		if !e.enter(c) {
			_ = c.Close()
			return
		}
		served.Add(1)
		go func() {
			defer served.Done()
			defer e.leave(c)
			e.echo(c.(*net.TCPConn))
		}()
	})
}

func (e *Echo) enter(c net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.peers = append(e.peers, unmap(c.RemoteAddr()))
	e.conns[c] = struct{}{}
	return true
}

func (e *Echo) leave(c net.Conn) {
	_ = c.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.conns, c)
}

func (e *Echo) echo(c *net.TCPConn) {
	if _, err := io.WriteString(c, e.says(c.RemoteAddr())+"\n"); err != nil {
		return
	}
	if _, err := io.Copy(c, struct{ io.Reader }{c}); err == nil { // io.Copy(c, c) would keep a pipe open
		_ = c.CloseWrite()
	}
}

// says is the server's greeting for a client.
func (e *Echo) says(to net.Addr) string {
	if e.witness {
		return e.Name + " " + unmap(to).String()
	}
	return e.Name
}

// EchoUDP answers each datagram on the port with its name, a newline, and the
// datagram. It ends with the test.
func (h *Host) EchoUDP(t testing.TB, port uint16) *Echo {
	t.Helper()
	return h.serveDatagrams(t, fmt.Sprintf(":%d", port), false)
}

// EchoUDP serves at all backends.
func (lab *Lab) EchoUDP(t testing.TB, port uint16) {
	for _, b := range lab.Backends {
		b.EchoUDP(t, port)
	}
}

// WitnessUDP is EchoUDP whose servers also send the address that they see, after
// their name and a space.
func (h *Host) WitnessUDP(t testing.TB, port uint16) *Echo {
	t.Helper()
	return h.serveDatagrams(t, fmt.Sprintf(":%d", port), true)
}

// WitnessUDPAt is WitnessUDP on one address.
func (h *Host) WitnessUDPAt(t testing.TB, address string) *Echo {
	t.Helper()
	return h.serveDatagrams(t, address, true)
}

// LongQueue gives a server's socket room for the datagrams that come while its thread has no CPU.
func LongQueue(pc net.PacketConn) {
	if raw, err := pc.(*net.UDPConn).SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20) })
	}
}

func (h *Host) serveDatagrams(t testing.TB, address string, witness bool) *Echo {
	t.Helper()
	pc, err := h.ListenPacket("udp", address)
	must.OKf(t, err, "%s", h.Name())
	LongQueue(pc)
	e := &Echo{Name: fmt.Sprintf("%s:%d", h.Name(), pc.LocalAddr().(*net.UDPAddr).Port), witness: witness}
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.serveUDP(pc)
	}()
	e.close = sync.OnceFunc(func() {
		_ = pc.Close()
		<-done
	})
	t.Cleanup(e.close)
	return e
}

func (e *Echo) serveUDP(pc net.PacketConn) {
	buf := make([]byte, 65536)
	for {
		n, from, err := pc.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error in reply to an earlier answer
		}
		e.mu.Lock()
		e.peers = append(e.peers, unmap(from))
		e.mu.Unlock()
		_, _ = pc.WriteTo(append([]byte(e.says(from)+"\n"), buf[:n]...), from)
	}
}

func unmap(a net.Addr) netip.AddrPort {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Ask connects from the host, reads an echo server's name, sends a line, waits for
// it to come back, and closes. It returns the server's name.
func (h *Host) Ask(network, address string) (string, error) {
	c, err := h.Dial(network, address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return AskOn(c)
}

// AskOn is Ask on a new connection, which it leaves open.
func AskOn(c net.Conn) (string, error) {
	if err := c.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return "", err
	}
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	r := bufio.NewReaderSize(c, 64)
	name, err := r.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("name: %w", err)
	}
	const line = "knock knock\n"
	if _, err := io.WriteString(c, line); err != nil {
		return "", err
	}
	back, err := r.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("echo: %w", err)
	}
	if back != line {
		return "", fmt.Errorf("echo: got %q, want %q", back, line)
	}
	return strings.TrimSuffix(name, "\n"), nil
}
