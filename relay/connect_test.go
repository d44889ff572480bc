package relay

import (
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// ports is a fake whose connects are answered by which local address they have.
type ports struct {
	*fake
	answer func(local netip.AddrPort) sys.Errno
	asked  []netip.AddrPort
	opts   sys.ConnectOptions // of the last
}

func (p *ports) connect(_, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	p.asked, p.opts = append(p.asked, local), o
	if e := p.answer(local); e != 0 {
		return -1, e
	}
	return 7, sys.EINPROGRESS
}

// TestConnectAsTheClient: from its address, and where only some ports will do,
// from one of those, which the workers share out.
func TestConnectAsTheClient(t *testing.T) {
	client, endpoint := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.2.1.2:80")
	k := &ports{fake: newFake(nil)}
	r := New(Config{Workers: 2})
	r.kernel = k
	first, second := r.newWorker(k.fake), r.newWorker(k.fake)

	k.answer = func(netip.AddrPort) sys.Errno { return 0 }
	fd, e := first.ConnectAs(endpoint, client, [2]uint16{}, sys.ConnectOptions{Congestion: "cubic"})
	if fd != 7 || e != sys.EINPROGRESS || len(k.asked) != 1 || k.asked[0] != netip.AddrPortFrom(client, 0) {
		t.Errorf("%d, %v, asked for %v", fd, e, k.asked)
	}
	if !k.opts.Transparent || k.opts.Congestion != "cubic" {
		t.Errorf("options %+v", k.opts)
	}

	for i, w := range []*Worker{first, second} {
		w.UseReplyPorts(61000, 61009)
		taken := map[uint16]bool{}
		k.answer = func(local netip.AddrPort) sys.Errno {
			if taken[local.Port()] {
				return sys.EADDRNOTAVAIL
			}
			taken[local.Port()] = true
			return 0
		}
		for n := range 6 {
			k.asked = nil
			_, e := w.ConnectAs(endpoint, client, [2]uint16{}, sys.ConnectOptions{})
			want := sys.EINPROGRESS
			if n == 5 { // half of the ten ports are the other worker's
				want = sys.EADDRNOTAVAIL
			}
			if e != want {
				t.Errorf("worker %d, connection %d: %v after %v", i, n, e, k.asked)
			}
			for _, local := range k.asked {
				if p := local.Port(); local.Addr() != client || p < 61000 || p > 61009 || int(p-61000)%2 != i {
					t.Errorf("worker %d asked for %s", i, local)
				}
			}
		}
	}
}

// TestConnectUntracked: by a transparent socket with a mark, from a port that the
// kernel chooses, and not from one of those for clients' addresses.
func TestConnectUntracked(t *testing.T) {
	endpoint := netip.MustParseAddrPort("[fd00:2::2]:80")
	k := &ports{fake: newFake(nil)}
	r := New(Config{Workers: 1})
	r.kernel = k
	w := r.newWorker(k.fake)
	w.UseReplyPorts(10000, 29999)
	k.answer = func(local netip.AddrPort) sys.Errno {
		if len(k.asked) == 1 {
			return sys.EADDRNOTAVAIL // all that the kernel has are taken
		}
		return 0
	}
	if _, e := w.ConnectUntracked(endpoint, 0x100, sys.ConnectOptions{Congestion: "cubic"}); e != sys.EINPROGRESS ||
		!k.opts.Transparent || k.opts.Mark != 0x100 || k.opts.Congestion != "cubic" || len(k.asked) != 2 {
		t.Fatalf("%v after %v, %+v", e, k.asked, k.opts)
	}
	if k.asked[0].IsValid() || k.asked[1].Port() < KernelPorts().First {
		t.Errorf("asked for %v", k.asked)
	}
}
