package sctp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Many clients connect in one burst, and all are served.
func TestProxyHoldsManyAssociations(t *testing.T) {
	associations := 300
	if full() {
		associations = 1000
	}
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	small := sys.SCTPOptions{OutStreams: 10, InStreams: 10}
	accepted := make(chan *peer, associations)
	serve(t, b.Namespace, at(b), small, func(p *peer) {
		p.buffer = make([]byte, 100)
		accepted <- p
	})
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
	clients := make([]*peer, associations)
	must.OK(t, lab.Client.Do(func() error {
		for i := range clients {
			fd, e := sys.ConnectSCTP(netip.MustParseAddrPort("10.96.0.10:3868"), netip.Addr{}, small)
			if e != 0 && e != sys.EINPROGRESS {
				return e
			}
			clients[i] = &peer{fd: fd, buffer: make([]byte, 100)}
		}
		return nil
	}))
	for i, c := range clients {
		wait.For(t, "connected", patience, func() error {
			_, e := sys.SCTPConnected(c.fd)
			if e != 0 && e != sys.EAGAIN {
				t.Fatalf("association %d: %v", i, e)
			}
			if e != 0 {
				return e
			}
			return nil
		})
		must.OKf(t, c.send(note{text: fmt.Append(nil, i)}), "association %d", i)
	}
	for range clients {
		e := <-accepted
		defer e.abort()
		got, err := e.receive()
		if err == nil {
			err = e.send(got)
		}
		must.OK(t, err)
	}
	for i, c := range clients {
		if got, err := c.receive(); err != nil || string(got.text) != fmt.Sprint(i) {
			t.Errorf("association %d: %q, %v", i, got.text, err)
		}
	}
	for _, c := range clients {
		c.abort()
	}
	for _, r := range p.ended(associations) {
		if r.End != "client_abort" || r.FromClient != 1 || r.FromEndpoint != 1 {
			t.Errorf("%+v", r)
		}
	}
}

// A client that begins its association anew, as after a crash, gets an ABORT: what was
// sent before may be lost. It connects again.
func TestProxyEndsRestartedClients(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
	open := func() (*peer, error) {
		t.Helper()
		var fd int
		must.OK(t, lab.Client.Do(func() (err error) {
			if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP); err != nil {
				return err
			}
			err = errors.Join(
				unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
				unix.Bind(fd, &unix.SockaddrInet4{Addr: lab.Client.IPv4.As4(), Port: 40000}))
			if e := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: port}); e != unix.EINPROGRESS {
				err = errors.Join(err, e)
			}
			return err
		}))
		a := newPeer(fd)
		var e sys.Errno
		wait.For(t, "connected", patience, func() error {
			if _, e = sys.SCTPConnected(fd); e == sys.EAGAIN {
				return e
			}
			return nil
		})
		if e != 0 {
			a.abort()
			return nil, e
		}
		return a, nil
	}
	first := must.Get(open())(t)
	talk(t, first, "before the crash")
	_, services, _ := net.ParseCIDR("10.96.0.0/16")
	nowhere := &netlink.Route{Dst: services, Type: unix.RTN_BLACKHOLE, Priority: 1}
	must.OK(t, lab.Client.Netlink().RouteAdd(nowhere))
	first.abort() // the ABORT is lost
	must.OK(t, lab.Client.Netlink().RouteDel(nowhere))
	again, err := open()
	if err == nil { // else the ABORT is there already
		_, err = again.receive()
		again.abort()
	}
	check.ErrorIsf(t, err, sys.ECONNRESET, "the restarted client saw")
	if r := p.ended(1)[0]; r.End != "client_abort" || r.FromClient != 1 {
		t.Errorf("%+v", r)
	}
	third := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
	talk(t, third, "afterwards")
	third.abort()
	p.ended(1)
}
