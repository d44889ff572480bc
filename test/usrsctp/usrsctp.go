// Package usrsctp gives tests SCTP peers in userspace, by Debian's libusrsctp over raw
// sockets: associations pass kernels that have no SCTP.
package usrsctp

import (
	"bufio"
	_ "embed" // for peer.c
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

//go:embed peer/peer.c
var source string

// patience bounds every wait for a peer.
const patience = time.Minute

// built is the program, compiled once for a test program.
var built struct {
	once sync.Once
	path string
	err  error
}

// Clean removes the program that a package's tests have compiled. It belongs into TestMain.
func Clean() {
	if built.path != "" {
		_ = os.RemoveAll(filepath.Dir(built.path))
	}
}

// program compiles the peer, or skips the test where the library is missing.
func program(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat("/usr/include/usrsctp.h"); err != nil {
		if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIP-NEEDS: Debian's package libusrsctp-dev: %v", err)
	}
	if _, err := os.Stat("/proc/net/sctp"); err == nil {
		t.Skip("SKIP-NEEDS: a kernel without SCTP: it would answer the peers' packets with ABORTs")
	}
	built.once.Do(func() {
		dir, err := os.MkdirTemp("", "sluice-usrsctp-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "peer")
		file := filepath.Join(dir, "peer.c")
		if built.err = os.WriteFile(file, []byte(source), 0o600); built.err != nil {
			return
		}
		out, err := exec.Command("gcc", "-O1", "-Wall", "-Werror", "-o", built.path, file, "-lusrsctp", "-lpthread").CombinedOutput()
		if err != nil {
			built.err = fmt.Errorf("compile the SCTP peer: %w\n%s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.path
}

// Peer is a running peer.
type Peer struct {
	cmd   *netns.Cmd
	in    io.WriteCloser
	lines chan string
	end   func() error
}

// start runs a peer in a host. It is killed when the test ends.
func start(t testing.TB, h *netns.Host, args ...string) *Peer {
	t.Helper()
	p := &Peer{cmd: h.Command(t, program(t), args...), lines: make(chan string, 16)}
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.in, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	must.OK(t, err)
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	})
	p.end = sync.OnceValue(func() error {
		_ = p.in.Close()
		reading.Wait()
		return p.cmd.Wait()
	})
	t.Cleanup(p.Kill)
	return p
}

// Kill ends the peer at once: it sends nothing more.
func (p *Peer) Kill() {
	_ = p.cmd.Process.Kill()
	for range p.lines { // so that its reader ends
	}
	_ = p.end()
}

// ErrSilent means that a peer has written nothing for a minute.
var ErrSilent = errors.New("the peer says nothing")

// Line returns the next line that the peer writes.
func (p *Peer) Line() (string, error) {
	select {
	case line, ok := <-p.lines:
		if !ok {
			return "", errors.New("the peer has ended")
		}
		return line, nil
	case <-time.After(patience):
		return "", ErrSilent
	}
}

// Expect returns an error if the next line is another one.
func (p *Peer) Expect(want string) error {
	line, err := p.Line()
	if err == nil && line != want {
		err = fmt.Errorf("%q in place of %q", line, want)
	}
	return err
}

// Listener is a port of a server, at some addresses of its host, or at all of them if none
// is named.
type Listener struct {
	Port uint16
	At   []netip.Addr
}

// Serve starts a server in a host, which may have one peer at a time. It answers "who?" with
// the host's name.
func Serve(t testing.TB, h *netns.Host, listeners ...Listener) *Peer {
	t.Helper()
	args := []string{"serve", h.Name()}
	for _, l := range listeners {
		var at []string
		for _, a := range l.At {
			at = append(at, a.String())
		}
		args = append(args, fmt.Sprintf("%d=%s", l.Port, strings.Join(at, ",")))
	}
	p := start(t, h, args...)
	must.OK(t, p.Expect("ready"))
	return p
}

// Call says how a client behaves.
type Call struct {
	To       netip.AddrPort
	Messages int
	Size     int
	How      string // "close", "abort" or "wait"; empty is "close"
	Port     uint16 // its own, or 0
	From     []netip.Addr
}

// Connect starts a client in a host.
func (c Call) Connect(t testing.TB, h *netns.Host) *Peer {
	t.Helper()
	if c.How == "" {
		c.How = "close"
	}
	args := []string{
		"connect", c.To.Addr().String(), strconv.Itoa(int(c.To.Port())),
		strconv.Itoa(c.Messages), strconv.Itoa(c.Size), c.How, strconv.Itoa(int(c.Port)),
	}
	for _, a := range c.From {
		args = append(args, a.String())
	}
	return start(t, h, args...)
}

// Answer is what a server said of itself and its client.
type Answer struct {
	Server string
	Client netip.AddrPort
	// ClientAddresses is how many the server knows of its client, ServerAddresses how many
	// the client knows of its server.
	ClientAddresses, ServerAddresses int
}

// Answered waits until all messages have come back.
func (p *Peer) Answered() (a Answer, err error) {
	line, err := p.Line()
	if err != nil {
		return a, err
	}
	var client string
	var port uint16
	if _, err := fmt.Sscanf(strings.ReplaceAll(line, ",", " "), "%s %s %d %d %d", &a.Server, &client, &port, &a.ClientAddresses, &a.ServerAddresses); err != nil {
		return a, errors.New(line)
	}
	addr, err := netip.ParseAddr(client)
	if err != nil {
		return a, err
	}
	a.Client = netip.AddrPortFrom(addr, port)
	return a, p.Expect("exchanged")
}

// Do runs a client to its end.
func (c Call) Do(t testing.TB, h *netns.Host) (Answer, error) {
	t.Helper()
	p := c.Connect(t, h)
	a, err := p.Answered()
	if err == nil {
		err = p.Expect("done")
	}
	if errors.Is(err, ErrSilent) {
		p.Kill()
	}
	return a, errors.Join(err, p.end())
}

// Again has a client that waits exchange its messages once more, and close.
func (p *Peer) Again() error {
	if _, err := io.WriteString(p.in, "go\n"); err != nil {
		return err
	}
	if err := p.Expect("again"); err != nil {
		return err
	}
	return errors.Join(p.Expect("done"), p.end())
}
