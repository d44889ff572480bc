package world

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

const testPort = 7001

// newTestWorld needs root, as the benchmark does.
func newTestWorld(t *testing.T, opts Options) *World {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("SLUICE_REQUIRE_ROOT") != "" {
			t.Fatal("root is needed")
		}
		t.Skip("SKIP-NEEDS: root")
	}
	w := must.Get(New(opts))(t)
	t.Cleanup(w.Close)
	return w
}

// serveName answers every connection with the connection's destination address.
func serveName(t *testing.T, ns *Namespace, at netip.Addr, control func(string, string, syscall.RawConn) error) {
	t.Helper()
	var l net.Listener
	err := ns.Do(func() (err error) {
		lc := net.ListenConfig{Control: control}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(context.Background(), "tcp", netip.AddrPortFrom(at, testPort).String())
		return err
	})
	must.OK(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, conn.LocalAddr().String())
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
}

// patience is how long an answer may take, silence how long none is waited for.
const patience, silence = 20 * time.Second, 2 * time.Second

// ask connects from the client and returns the answer or the error.
func ask(w *World, to netip.Addr, patience time.Duration) string {
	var answer []byte
	err := w.Client.Do(func() error {
		conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(to, testPort).String(), patience)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		answer, err = io.ReadAll(conn)
		return err
	})
	if err != nil {
		return err.Error()
	}
	return string(answer)
}

func TestDirectAndDNAT(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%v", ipv6), func(t *testing.T) {
			w := newTestWorld(t, Options{IPv6: ipv6, Clients: 2, Endpoints: 2})
			var names []string
			for _, e := range w.Endpoints {
				serveName(t, w.Server, e, nil)
				name := netip.AddrPortFrom(e, testPort).String()
				names = append(names, name)
				if got := ask(w, e, patience); got != name {
					t.Errorf("asked %s directly, got %q", name, got)
				}
			}
			if got := ask(w, w.VIP, silence); strings.HasPrefix(got, names[0][:4]) {
				t.Errorf("the service answers before anything steers to it: %q", got)
			}
			must.OK(t, w.DNAT())
			counts := map[string]int{}
			for range 6 {
				counts[ask(w, w.VIP, patience)]++
			}
			if counts[names[0]] != 3 || counts[names[1]] != 3 {
				t.Errorf("DNAT spread six connections as %v", counts)
			}
		})
	}
}

func TestTPROXY(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%v", ipv6), func(t *testing.T) {
			w := newTestWorld(t, Options{IPv6: ipv6, Clients: 1, Endpoints: 1})
			must.OK(t, w.AnyIP())
			must.OK(t, w.TPROXY())
			level, name := unix.SOL_IP, unix.IP_TRANSPARENT
			if ipv6 {
				level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
			}
			serveName(t, w.Node, w.Loopback(), func(_, _ string, c syscall.RawConn) (err error) {
				if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, name, 1) }); e != nil {
					return e
				}
				return err
			})
			want := netip.AddrPortFrom(w.VIP, testPort).String()
			check.Equalf(t, ask(w, w.VIP, patience), want, "the listener saw")
		})
	}
}

// All processes in a namespace end with it, even if nobody stops them.
func TestCloseKills(t *testing.T) {
	w := newTestWorld(t, Options{Clients: 1, Endpoints: 1})
	ns := must.Get(NewNamespace())(t)
	p := must.Get(ns.Start(Command{Path: "sleep", Args: []string{"60"}}))(t)
	ns.Close()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Error("the process is alive without its namespace")
		p.Stop()
	}
	if _, err := w.Client.Run(Command{Path: "sleep", Args: []string{"60"}}, 50*time.Millisecond); err == nil {
		t.Error("a program that runs too long is no error")
	}
	out, err := w.Client.Run(Command{Path: "cat", Stdin: []byte("there and back")}, patience)
	if err != nil || string(out) != "there and back" {
		t.Errorf("cat: %q, %v", out, err)
	}
}

func TestTail(t *testing.T) {
	l := &tail{limit: 5}
	for _, s := range []string{"one", "two", "three"} {
		must.OK(t, must.Err(l.Write([]byte(s))))
	}
	if l.String() != "three" {
		t.Errorf("kept %q", l)
	}
}
