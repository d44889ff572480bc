package upstream

import (
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// TestPrivilegedPorts: a client with a privileged port gets one where the endpoint sees
// the node's address, its own if possible. Others are served as if there were no such ports.
func TestPrivilegedPorts(t *testing.T) {
	const own, taken = 777, sys.EADDRINUSE
	remote := netip.MustParseAddrPort("10.2.1.2:80")
	all := func(e sys.Errno) func(uint16) sys.Errno {
		return func(port uint16) sys.Errno {
			if port != 0 && port < 1024 {
				return e
			}
			return 0
		}
	}
	except := func(e sys.Errno) func(uint16) sys.Errno {
		return func(port uint16) sys.Errno {
			if port == own {
				return e
			}
			return 0
		}
	}
	reserve := func(r *Rules) {
		r.reserved = new(sys.PortSet)
		r.reserved[own/64] |= 1 << (own % 64)
	}
	const theOwn, another, none = "the client's own", "another privileged", "none privileged"
	for _, c := range []struct {
		what     string
		choice   Choice
		port     uint16
		endpoint netip.AddrPort
		change   func(*Rules)
		answer   func(port uint16) sys.Errno
		want     string // which port is the last that is asked for
		asked    int    // 0: any number
		from     string // the local address of all
		mark     uint32 // of the last
	}{
		{"from the node", Choice{Kind: FromNode}, own, remote, nil, all(0), theOwn, 1, "0.0.0.0", 0},
		{"from the node, not steered", Choice{Kind: FromNode, Mark: 0x200, MayReturn: true}, own, remote, nil, all(0), theOwn, 1, "0.0.0.0", 0x200},
		{"past connection tracking", Choice{Kind: Untracked, Mark: 0x100}, own, remote, nil, all(0), theOwn, 1, "0.0.0.0", 0},
		{"to an own endpoint", Choice{Kind: ToOwn}, own, netip.MustParseAddrPort("10.1.0.1:40000"), nil, all(0), theOwn, 1, "0.0.0.0", 0},
		{"from a client's address that is the node's", Choice{Kind: FromOwnClient, Mark: 0x200, MayReturn: true}, own, remote, nil, all(0), theOwn, 1, "10.1.0.1", 0x200},
		{"the lowest port of clients", Choice{}, 512, remote, nil, all(0), theOwn, 1, "0.0.0.0", 0},
		{"the highest port", Choice{}, 1023, remote, nil, all(0), theOwn, 1, "0.0.0.0", 0},

		{"a server has the port", Choice{}, own, remote, nil, except(sys.EADDRINUSE), another, 2, "0.0.0.0", 0},
		{"a connection to the endpoint has it", Choice{Kind: FromOwnClient}, own, remote, nil, except(sys.EADDRNOTAVAIL), another, 2, "10.1.0.1", 0},
		{"it is for servers", Choice{}, 511, remote, nil, all(0), another, 1, "0.0.0.0", 0},
		{"it is for servers", Choice{}, 1, remote, nil, all(0), another, 1, "0.0.0.0", 0},
		{"it is reserved", Choice{}, own, remote, reserve, all(0), another, 1, "0.0.0.0", 0},
		{"it is the endpoint's", Choice{}, own, netip.MustParseAddrPort("10.1.0.1:777"), nil, all(0), another, 0, "0.0.0.0", 0},
		{"it brings replies back to clients", Choice{}, own, remote, func(r *Rules) { r.replies.FirstPort, r.replies.LastPort = own, own }, all(0), another, 1, "0.0.0.0", 0},

		{"all are taken", Choice{}, own, remote, nil, all(taken), none, 1 + portTries + 1, "", 0},
		{"all are taken, past connection tracking", Choice{Kind: Untracked, Mark: 0x100}, own, remote, nil, all(taken), none, 1 + portTries + 1, "", 0x100},
		{"no right to bind them", Choice{}, own, remote, nil, all(sys.EACCES), none, 2, "", 0},
		{"no right to bind them, the client's own address", Choice{Kind: FromOwnClient}, own, remote, nil, all(sys.EACCES), none, 2, "10.1.0.1", 0},

		{"past connection tracking and not steered", Choice{Kind: Untracked, Mark: 0x100, MayReturn: true}, own, remote, nil, all(0), none, 1, "", 0x100},
		{"from the client's address", Choice{Kind: FromClient}, own, remote, nil, all(0), none, 1, "10.1.0.1", 0},
		{"a client with the first ordinary port", Choice{}, 1024, remote, nil, all(0), none, 1, "", 0},
		{"a client with an ordinary port, past connection tracking", Choice{Kind: Untracked, Mark: 0x100}, 40000, remote, nil, all(0), none, 1, "", 0x100},
	} {
		r := rules(nil)
		if r.reserved = nil; c.change != nil {
			c.change(r)
		}
		f := &fakeDial{answer: func(local netip.AddrPort) sys.Errno { return c.answer(local.Port()) }}
		client := netip.AddrPortFrom(netip.MustParseAddr("10.1.0.1"), c.port)
		if _, e := newDialer(r, f, 0, 1).Connect(&c.choice, c.endpoint, client, Range{}, sys.ConnectOptions{}); e != sys.EINPROGRESS {
			t.Errorf("%s: %v after %v", c.what, e, f.asked)
			continue
		}
		last := f.asked[len(f.asked)-1]
		got := none
		switch {
		case last.Port() == c.port:
			got = theOwn
		case privileged.has(last.Port()) && last.Port() != c.endpoint.Port():
			got = another
		}
		from := last.Addr().String()
		if !last.IsValid() {
			from = ""
		}
		if got != c.want || from != c.from || c.asked != 0 && len(f.asked) > c.asked || f.opts.Mark != c.mark {
			t.Errorf("%s: asked for %v, mark %#x; want %s at last, from %q, mark %#x, %d", c.what, f.asked, f.opts.Mark, c.want, c.from, c.mark, c.asked)
		}
		if transparent := c.choice.Kind == FromClient || c.choice.Kind == Untracked && c.want == none; f.opts.Transparent != transparent {
			t.Errorf("%s: the socket is transparent: %t", c.what, f.opts.Transparent)
		}
	}
}

// TestOrdinaryPortsCostNothing: a client with an ordinary port costs no allocation and no
// system call more.
func TestOrdinaryPortsCostNothing(t *testing.T) {
	f := &fakeDial{answer: func(netip.AddrPort) sys.Errno { return 0 }, asked: make([]netip.AddrPort, 0, 1)}
	d, choice := newDialer(rules(nil), f, 0, 1), &Choice{}
	endpoint, client := netip.MustParseAddrPort("10.2.1.2:80"), netip.MustParseAddrPort("10.1.0.2:1024")
	connects := uint64(0)
	if n := testing.AllocsPerRun(100, func() {
		f.asked = f.asked[:0]
		connects++
		_, _ = d.Connect(choice, endpoint, client, Range{}, sys.ConnectOptions{})
	}); n != 0 || d.Calls() != 4*connects {
		t.Errorf("%v allocations, %d system calls for %d connections", n, d.Calls(), connects)
	}
}
