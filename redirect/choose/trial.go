package choose

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
)

// trialPatience bounds each attempt to connect in a trial. On lo an answer takes
// microseconds, but an interface that has just come up may lose its first
// packets, and a busy machine is to get the same choice as an idle one.
var trialPatience = []time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond, time.Second}

// trialAddresses are the services' in a trial, and sourceAddresses the node's.
// They are for documentation (RFC 5737, RFC 3849): if a trial went wrong, nobody
// would be harmed.
var (
	trialAddresses  = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	sourceAddresses = []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:1::1")}
)

// Try tries the mode with this name, and returns why it does not work here. A
// *RepliesError says that it works without clients' addresses.
func Try(name string, o Options) error {
	for _, w := range all {
		if w.name == name {
			return try(w, o)
		}
	}
	return fmt.Errorf("no mode is called %q", name)
}

// try plays a trial in a namespace of its own, or, where none can be made, has
// the mode look for itself what it lacks.
func try(w candidate, o Options) error {
	node, err := newNode()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOSPC) {
		return look(w, o)
	}
	if err != nil {
		return err
	}
	defer node.Close()
	// Nothing in it can clash, and no address of the node's is there.
	o.Routes, o.BPFRoot = route.Options{NetNS: node.FD()}, ""
	return play(w, o, node)
}

// Scratch returns why trials cannot have a namespace of their own, and why they
// cannot try whether answers come back to clients' addresses.
func Scratch() (namespace, answers error) {
	node, err := newNode()
	if err != nil {
		return err, err
	}
	defer node.Close()
	away, err := newEndpoint(node)
	if err == nil {
		away.Close()
	}
	return nil, err
}

// newNode makes a network namespace whose interface lo is up and has the addresses that
// connections come from.
func newNode() (*scratch.Namespace, error) {
	n, err := scratch.New("trial")
	if err != nil {
		return nil, err
	}
	for _, a := range sourceAddresses {
		if err := n.AddAddresses("lo", single(a)); err != nil && a.Is4() {
			n.Close()
			return nil, err
		}
	}
	return n, nil
}

// look opens a mode and closes it again, which changes nothing in
// the namespace, and makes a transparent socket, as every mode needs. Whether it
// would bring answers back is what it says by itself.
func look(w candidate, o Options) error {
	r, err := w.open(o)
	if err != nil {
		return err
	}
	replies := r.Traits().Replies
	if err := r.Close(); err != nil {
		return err
	}
	err = MayListen(o.Routes.NetNS)
	if err == nil && !o.NoReplies {
		err = claimsAnswers(replies)
	}
	return err
}

// play puts a plan in force and connects through it, then tries whether an
// endpoint's answers to a client's address come back.
func play(w candidate, o Options, node *scratch.Namespace) (err error) {
	r, err := w.open(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return sys.InNetNS(o.Routes.NetNS, func() error {
		s := &stage{each: r.Traits().BindEach, sockets: map[service.Destination]int{}}
		defer s.close()
		plan, err := s.plan()
		if err == nil {
			err = r.Apply(plan)
		}
		if err != nil {
			return err
		}
		for d, fd := range s.sockets {
			if err := reaches(d, fd); err != nil {
				return err
			}
		}
		if o.NoReplies {
			return nil
		}
		return bringsAnswers(r, node)
	})
}

// stage is the listening sockets of a trial, one for each family that the
// kernel has.
type stage struct {
	each    bool // one is bound to each destination itself
	sockets map[service.Destination]int
}

// plan makes the sockets, and the plan that leads to them: port 80 is served,
// port 81 refuses.
func (s *stage) plan() (redirect.Plan, error) {
	var p redirect.Plan
	for _, a := range trialAddresses {
		if a.Is6() && TryIPv6() != nil {
			continue
		}
		d := service.Destination{Addr: a, Port: 80, Protocol: service.TCP}
		at := netip.AddrPortFrom(a, d.Port)
		if !s.each {
			at = netip.AddrPortFrom(redirect.ListenIPv4, 0)
			if a.Is6() {
				at = netip.AddrPortFrom(redirect.ListenIPv6, 0)
			}
		}
		fd, err := listen(at)
		if err != nil {
			return p, err
		}
		s.sockets[d] = fd
		own, e := sys.LocalAddr(fd)
		if e != 0 {
			return p, fmt.Errorf("own address of a listening socket: %w", e)
		}
		p.Steer = p.Steer.With(d, redirect.Target{Port: own.Port(), FD: fd})
		p.Refuse = p.Refuse.With(service.Destination{Addr: a, Port: d.Port + 1, Protocol: service.TCP}, struct{}{})
		p.ClusterIPs = p.ClusterIPs.With(a, struct{}{})
		p.Local = p.Local.With(netip.PrefixFrom(a, a.BitLen()-8).Masked(), struct{}{})
	}
	return p, nil
}

func (s *stage) close() {
	for _, fd := range s.sockets {
		sys.Close(fd)
	}
}

// MayListen returns why this process may make no transparent sockets in a network
// namespace.
func MayListen(namespace int) error {
	return sys.InNetNS(namespace, func() error {
		fd, err := listen(netip.AddrPortFrom(redirect.ListenIPv4, 0))
		if err == nil {
			sys.Close(fd)
		}
		return err
	})
}

// listen makes a transparent socket, which tells who may not.
func listen(at netip.AddrPort) (int, error) {
	fd, err := sys.ListenTCP(at, sys.ListenOptions{Transparent: true, FreeBind: true})
	if errors.Is(err, syscall.EPERM) {
		err = &redirect.MissingError{Mode: "listening", Feature: redirect.FeatureNetAdmin, Remedy: redirect.RemedyNetAdmin, Err: err}
	}
	return fd, err
}

// TryIPv6 returns why the calling thread's namespace has no IPv6.
func TryIPv6() error {
	fd, err := sys.ListenTCP(netip.AddrPortFrom(redirect.ListenIPv6, 0), sys.ListenOptions{})
	if err == nil {
		sys.Close(fd)
	}
	return err
}

// reaches connects to a destination, and to the port after it, which is to
// refuse.
func reaches(d service.Destination, listener int) error {
	c, err := dial(netip.AddrPortFrom(d.Addr, d.Port))
	if err != nil {
		return fmt.Errorf("a connection to %s: %w", d, err)
	}
	defer c.Close()
	fd, e := accept(listener)
	if e != 0 {
		return fmt.Errorf("a connection to %s came to another socket: %w", d, e)
	}
	defer sys.Close(fd)
	if to, e := sys.LocalAddr(fd); e != 0 || to != netip.AddrPortFrom(d.Addr, d.Port) {
		return fmt.Errorf("a connection to %s: its destination is not kept: %s", d, to)
	}
	d.Port++
	none, err := dial(netip.AddrPortFrom(d.Addr, d.Port))
	if err == nil {
		_ = none.Close()
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case err == nil:
		return fmt.Errorf("a connection to %s was not refused", d)
	}
	return fmt.Errorf("a connection to %s was not refused: %w", d, err)
}

// accept waits for a moment for a connection: the client's last packet, which completes the
// handshake, may come after the client has its connection.
func accept(listener int) (int, sys.Errno) {
	fd, _, e := sys.Accept(listener)
	for _, patience := range trialPatience {
		if e != sys.EAGAIN {
			break
		}
		time.Sleep(patience)
		fd, _, e = sys.Accept(listener)
	}
	return fd, e
}

// dial connects from the calling thread's namespace, in which it stays: Go makes
// the socket before it waits.
func dial(to netip.AddrPort) (c net.Conn, err error) {
	for _, patience := range trialPatience {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		c, err = new(net.Dialer).DialContext(ctx, "tcp", to.String())
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
	}
	return nil, err
}
