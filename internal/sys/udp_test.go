package sys

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// bound returns a UDP socket on a loopback address, and its address.
func bound(t *testing.T, ip string, o UDPOptions) (int, netip.AddrPort) {
	t.Helper()
	fd := must.Get(BindUDP(netip.AddrPortFrom(netip.MustParseAddr(ip), 0), o))(t)
	t.Cleanup(func() { Close(fd) })
	addr, e := LocalAddr(fd)
	must.Equal(t, e, 0)
	return fd, addr
}

// receiveAll receives until so many bytes are there, and gives the datagrams
// with the size of their GSO batches.
func receiveAll(t *testing.T, fd, datagrams int) (got [][]byte, segments []int, to []netip.AddrPort) {
	t.Helper()
	in := NewInbox(4)
	for len(got) < datagrams {
		until(t, fd, unix.POLLIN)
		n, e := in.Receive(fd, 0, in.Slots())
		must.Equalf(t, e, 0, "after %d datagrams", len(got))
		for i := range n {
			if in.Cut(i) {
				t.Fatal("a datagram was cut")
			}
			d, segment, _, _ := in.Details(i)
			p := in.Data(i)
			segments, to = append(segments, segment), append(to, d)
			for segment > 0 && len(p) > segment {
				got = append(got, bytes.Clone(p[:segment]))
				p = p[segment:]
			}
			got = append(got, bytes.Clone(p))
		}
	}
	return got, segments, to
}

// Datagrams of all sizes travel in GSO batches where they can, and come out as they
// went in, whatever the receiver understands.
func TestTrainsKeepDatagrams(t *testing.T) {
	sizes := []int{100, 100, 100, 100, 30, 100, 0, 1, 1, 1400, 1400, 1401, 1400, 9000, 9000, 1472, 1472, 5}
	for _, ip := range []string{"127.0.0.1", "::1"} {
		for _, coalesce := range []bool{false, true} {
			t.Run(fmt.Sprint(ip, " coalesce=", coalesce), func(t *testing.T) {
				to, addr := bound(t, ip, UDPOptions{Destination: true, Coalesce: coalesce, ReceiveBuffer: 1 << 20})
				from, _ := bound(t, ip, UDPOptions{})
				out := NewOutbox(32)
				var want [][]byte
				for i, size := range sizes {
					p := bytes.Repeat([]byte{byte(i)}, size)
					want = append(want, p)
					out.Append(addr, p, 0, true)
				}
				if out.n >= len(sizes) {
					t.Errorf("%d messages for %d datagrams: nothing was joined", out.n, len(sizes))
				}
				if e := out.Send(from); e != 0 || !out.Empty() {
					t.Fatalf("%v, empty %v", e, out.Empty())
				}
				got, segments, dst := receiveAll(t, to, len(want))
				must.Equalf(t, len(got), len(want), "datagrams")
				for i := range want {
					if !bytes.Equal(got[i], want[i]) {
						t.Errorf("datagram %d: %d bytes, want %d", i, len(got[i]), len(want[i]))
					}
				}
				for _, d := range dst {
					check.Equalf(t, d, addr, "destination")
				}
				check.Equalf(t, segments[0] != 0, coalesce, "segments %v", segments)
			})
		}
	}
}

// Datagrams leave from the source that was set, whatever the socket is bound to, alone, in
// batches, and in GSO batches that were split.
func TestSourceOfDatagrams(t *testing.T) {
	for _, c := range []struct{ bound, source, to string }{
		{"127.84.0.10", "10.96.0.10", "127.0.0.1"},
		{"100::10", "fd00:96::10", "::1"},
	} {
		server, addr := bound(t, c.to, UDPOptions{})
		fd, at := bound(t, c.bound, UDPOptions{Transparent: true, FreeBind: true, ReuseAddr: true})
		want := netip.AddrPortFrom(netip.MustParseAddr(c.source), at.Port())
		out, in := NewOutbox(8), NewInbox(1)
		out.SetSource(want.Addr())
		expect := func(n int) {
			t.Helper()
			for range n {
				until(t, server, unix.POLLIN)
				if got, e := in.Receive(server, 0, 1); got != 1 || e != 0 || in.From(0) != want {
					t.Fatalf("%d datagrams, %v, from %v, want %v", got, e, in.From(0), want)
				}
			}
		}
		out.Append(addr, []byte("alone"), 0, true)
		must.Equal(t, out.Send(fd), 0)
		expect(1)
		for range 3 {
			out.Append(addr, []byte("joined"), 0, true)
		}
		if !out.IsGSO() {
			t.Error("nothing was joined")
		}
		must.Equal(t, out.Send(fd), 0)
		expect(3)
		out.Append(addr, make([]byte, 700), 300, true)
		if lost, e := out.Split(fd); lost != 0 || e != 0 {
			t.Fatal(lost, e)
		}
		expect(3)
		out.SetSource(netip.Addr{})
		out.Append(addr, []byte("as bound"), 0, true)
		want = at
		must.Equal(t, out.Send(fd), 0)
		expect(1)
	}
}

// A GSO batch that the kernel does not take is sent datagram by datagram.
func TestSplit(t *testing.T) {
	to, addr := bound(t, "127.0.0.1", UDPOptions{})
	from, _ := bound(t, "127.0.0.1", UDPOptions{})
	out := NewOutbox(4)
	train := append(bytes.Repeat([]byte{1}, 700), bytes.Repeat([]byte{2}, 200)...)
	out.Append(addr, train, 300, true)
	out.Append(addr, []byte("next"), 0, true)
	if !out.IsGSO() {
		t.Fatal("no GSO batch")
	}
	if lost, e := out.Split(from); lost != 0 || e != 0 {
		t.Fatal(lost, e)
	}
	must.Equal(t, out.Send(from), 0)
	got, _, _ := receiveAll(t, to, 4)
	if len(got[0]) != 300 || len(got[1]) != 300 || len(got[2]) != 300 || string(got[3]) != "next" {
		t.Errorf("%q", got)
	}
	out.Append(addr, train, 300, false)
	if n := out.Skip(); n != 3 || !out.Empty() {
		t.Errorf("skipped %d datagrams, empty %v", n, out.Empty())
	}
}

// A socket hears of a closed port once, and can be used again for another.
func TestConnectedSocketIsUsedAgain(t *testing.T) {
	to, addr := bound(t, "127.0.0.1", UDPOptions{})
	fd, e := UDPSocket(false)
	must.Equal(t, e, 0)
	defer Close(fd)
	must.Equal(t, ConnectUDP(fd, nobody, netip.AddrPort{}), 0)
	if _, e := Send(fd, []byte("x"), false); e != 0 {
		t.Fatal(e)
	}
	var b [10]byte
	until(t, fd, unix.POLLERR)
	if _, e := Recv(fd, b[:]); e != ECONNREFUSED {
		t.Fatalf("%v, want a refusal", e)
	}
	must.Equal(t, DisconnectUDP(fd), 0)
	if local, e := LocalAddr(fd); e != 0 || local.Port() != 0 {
		t.Errorf("the socket kept its port: %v, %v", local, e)
	}
	Drain(fd)
	must.Equal(t, ConnectUDP(fd, addr, netip.AddrPort{}), 0)
	if _, e := Send(fd, []byte("x"), false); e != 0 {
		t.Fatal(e)
	}
	until(t, to, unix.POLLIN)
	if n, e := Recv(to, b[:]); n != 1 || e != 0 {
		t.Fatal(n, e)
	}
}

// Whatever control messages say, they are read within their bounds.
func FuzzDetails(f *testing.F) {
	f.Add([]byte{})
	f.Add(append(unix.UnixRights(1), 1, 2, 3))
	f.Fuzz(func(t *testing.T, control []byte) {
		in := NewInbox(1)
		in.headers[0].SetControllen(copy(in.controls[0][:], control))
		in.Details(0)
	})
}

// A datagram that is received by itself leaves nothing of the one that was in
// its slot before.
func TestReceiveOne(t *testing.T) {
	to, addr := bound(t, "127.0.0.1", UDPOptions{Destination: true})
	from, _ := bound(t, "127.0.0.1", UDPOptions{})
	out, in := NewOutbox(4), NewInbox(2)
	for _, p := range [][]byte{bytes.Repeat([]byte{'a'}, 700), {}, bytes.Repeat([]byte{'b'}, 65507)} {
		out.Append(addr, []byte("before"), 0, false)
		out.Append(addr, p, 0, false)
		must.Equal(t, out.Send(from), 0)
		until(t, to, unix.POLLIN)
		if n, e := in.Receive(to, 1, 1); n != 1 || e != 0 {
			t.Fatal(n, e)
		}
		until(t, to, unix.POLLIN)
		must.Equal(t, in.ReceiveOne(to, 1), 0)
		d, segment, _, _ := in.Details(1)
		if got := in.Data(1); !bytes.Equal(got, p) || segment != 0 || d.IsValid() || in.Cut(1) {
			t.Errorf("%d bytes for %v, train of %d, cut %v; want %d bytes", len(got), d, segment, in.Cut(1), len(p))
		}
	}
	check.Equalf(t, in.ReceiveOne(to, 0), EAGAIN, "nothing there")
}

// Receiving and sending allocates nothing.
func TestDatagramsAllocateNothing(t *testing.T) {
	to, addr := bound(t, "127.0.0.1", UDPOptions{Destination: true})
	from, _ := bound(t, "127.0.0.1", UDPOptions{})
	in, out := NewInbox(4), NewOutbox(4)
	p := make([]byte, 100)
	incoming := []unix.PollFd{{Fd: int32(to), Events: unix.POLLIN}}
	if n := testing.AllocsPerRun(100, func() {
		out.Append(addr, p, 0, true)
		out.Append(addr, p, 0, true)
		must.Equal(t, out.Send(from), 0)
		for n := 0; n < 1; n, _ = unix.Poll(incoming, 20_000) { // again after a signal
		}
		n, e := in.Receive(to, 0, 4)
		must.Equal(t, e, 0)
		for i := range n {
			in.From(i)
			in.Details(i)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
