package upstream

import (
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// fakeDial answers connects by the local address that they have.
type fakeDial struct {
	answer func(local netip.AddrPort) sys.Errno
	asked  []netip.AddrPort
	opts   sys.ConnectOptions // of the last
}

func (f *fakeDial) connect(_, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	f.asked, f.opts = append(f.asked, local), o
	if e := f.answer(local); e != 0 {
		return -1, e
	}
	return 7, sys.EINPROGRESS
}

// newDialer returns the Dialer of a loop on a fake.
func newDialer(r *Rules, f *fakeDial, number, loops int) *Dialer {
	d := r.NewDialer(func() int64 { return 1e12 }, number, loops)
	d.dial = f.connect
	return d
}

// TestConnectAsTheClient: from its address, and where only some ports will do, from one of
// those, which the loops share.
func TestConnectAsTheClient(t *testing.T) {
	client, endpoint := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.2.1.2:80")
	f := &fakeDial{answer: func(netip.AddrPort) sys.Errno { return 0 }}
	choice := &Choice{Kind: FromClient}
	fd, e := newDialer(rules(nil), f, 0, 2).Connect(choice, endpoint, netip.AddrPortFrom(client, 40000), Range{}, sys.ConnectOptions{Congestion: "cubic"})
	if fd != 7 || e != sys.EINPROGRESS || len(f.asked) != 1 || f.asked[0] != netip.AddrPortFrom(client, 0) {
		t.Errorf("%d, %v, asked for %v", fd, e, f.asked)
	}
	if !f.opts.Transparent || f.opts.Congestion != "cubic" {
		t.Errorf("options %+v", f.opts)
	}
	for _, c := range []struct {
		what  string
		rules *Rules
		held  Range
	}{
		{"a range for all clients", rules(func(r *Rules) { r.replies.FirstPort, r.replies.LastPort = 61000, 61009 }), Range{}},
		{"a range for this client", rules(nil), Range{61000, 61009}},
	} {
		for i := range 2 {
			d := newDialer(c.rules, f, i, 2)
			taken := map[uint16]bool{}
			f.answer = func(local netip.AddrPort) sys.Errno {
				if taken[local.Port()] {
					return sys.EADDRNOTAVAIL
				}
				taken[local.Port()] = true
				return 0
			}
			for n := range 6 {
				f.asked = nil
				_, e := d.Connect(choice, endpoint, netip.AddrPortFrom(client, 1023), c.held, sys.ConnectOptions{})
				want := sys.EINPROGRESS
				if n == 5 { // half of the ten ports are the other loop's
					want = sys.EADDRNOTAVAIL
				}
				if e != want {
					t.Errorf("%s: loop %d, connection %d: %v after %v", c.what, i, n, e, f.asked)
				}
				for _, local := range f.asked {
					if p := local.Port(); local.Addr() != client || p < 61000 || p > 61009 || int(p-61000)%2 != i {
						t.Errorf("%s: loop %d asked for %s", c.what, i, local)
					}
				}
			}
		}
	}
}

// TestConnectUntracked: by a transparent socket with a mark, from a port that the kernel
// chooses, and not from one of those for clients' addresses.
func TestConnectUntracked(t *testing.T) {
	endpoint := netip.MustParseAddrPort("[fd00:2::2]:80")
	r := rules(func(r *Rules) { r.replies.FirstPort, r.replies.LastPort = 10000, 29999 })
	f := &fakeDial{}
	f.answer = func(netip.AddrPort) sys.Errno {
		if len(f.asked) == 1 {
			return sys.EADDRNOTAVAIL // all of the kernel's are taken
		}
		return 0
	}
	d := newDialer(r, f, 0, 1)
	if _, e := d.Connect(&Choice{Kind: Untracked, Mark: 0x100}, endpoint, netip.AddrPort{}, Range{}, sys.ConnectOptions{Congestion: "cubic"}); e != sys.EINPROGRESS ||
		!f.opts.Transparent || f.opts.Mark != 0x100 || f.opts.Congestion != "cubic" || len(f.asked) != 2 {
		t.Fatalf("%v after %v, %+v", e, f.asked, f.opts)
	}
	if f.asked[0].IsValid() || f.asked[1].Port() < r.kernel.First {
		t.Errorf("asked for %v", f.asked)
	}
}

// TestPortsInTimeWait: ten ports serve a hundred connections, one after the other, whose
// clients close first, so that each port is in TIME_WAIT afterwards. When all ten are
// open, it is our own error.
func TestPortsInTimeWait(t *testing.T) {
	for _, on := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(on, func(t *testing.T) {
			l := must.Get(net.Listen("tcp", on))(t)
			defer l.Close()
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
				}
			}()
			endpoint := netip.MustParseAddrPort(l.Addr().String())
			r := rules(nil)
			d := r.NewDialer(func() int64 { return 1e12 }, 0, 1)
			last := r.spare.Last
			d.ports = newLocalPorts(Range{last - 9, last}, true, nil, 0, 1)
			connect := func() int {
				fd, e := d.Connect(&Choice{}, endpoint, netip.AddrPort{}, Range{}, sys.ConnectOptions{})
				if e != 0 && e != sys.EINPROGRESS {
					t.Fatal(e)
				}
				if local, _ := sys.LocalAddr(fd); !d.ports.ports.has(local.Port()) {
					t.Fatalf("port of %s was not chosen here", local)
				}
				// From here on calls wait.
				must.OK(t, syscall.SetNonblock(fd, false))
				must.OK(t, must.Err(syscall.Write(fd, []byte("hello"))))
				return fd
			}
			read := func(fd int) string {
				var got []byte
				for b := make([]byte, 16); len(got) < 5; {
					n, err := syscall.Read(fd, b)
					if n <= 0 {
						t.Fatalf("%q, %v", got, err)
					}
					got = append(got, b[:n]...)
				}
				return string(got)
			}
			for range 100 {
				fd := connect()
				must.OK(t, syscall.Shutdown(fd, syscall.SHUT_WR))
				must.Equal(t, read(fd), "hello")
				if n, err := syscall.Read(fd, make([]byte, 1)); n != 0 || err != nil {
					t.Fatal(n, err)
				}
				sys.CloseInOrder(fd)
			}
			for range 10 {
				fd := connect()
				defer sys.Close(fd)
				read(fd)
			}
			if fd, e := d.Connect(&Choice{}, endpoint, netip.AddrPort{}, Range{}, sys.ConnectOptions{}); e != sys.EADDRNOTAVAIL {
				t.Errorf("an eleventh connection: %d, %v", fd, e)
			}
		})
	}
}

// TestPortsUnderPressure: the kernel chooses until many ports are in TIME_WAIT.
func TestPortsUnderPressure(t *testing.T) {
	lp := newLocalPorts(Range{1000, 1999}, false, nil, 1, 4)
	seen := map[uint16]bool{}
	for range 1000 {
		port := lp.choose()
		if port < 1000 || port > 1999 || port%4 != 1 {
			t.Fatalf("port %d", port)
		}
		seen[port] = true
	}
	must.Equalf(t, len(seen), 250, "how many of 250 ports used")
	var keep sys.PortSet
	for i := range keep {
		keep[i] = ^uint64(0)
	}
	lp.keep = &keep
	if port := lp.choose(); port < 1000 || port > 1999 {
		t.Fatalf("port %d of a range that is reserved as a whole", port)
	}
	keep[1001/64] &^= 1 << (1001 % 64)
	must.Equalf(t, lp.choose(), 1001, "the port that is not reserved")
	now := int64(1e12)
	if lp.crowded(now) {
		t.Fatal("crowded with none")
	}
	for range maxResting {
		lp.rest(now)
	}
	for _, c := range []struct {
		after   time.Duration
		crowded bool
	}{{0, true}, {59 * time.Second, true}, {60 * time.Second, true}, {61 * time.Second, false}, {200 * time.Second, false}} {
		check.Equalf(t, lp.crowded(now+int64(c.after)), c.crowded, "after %v: crowded", c.after)
	}
}
