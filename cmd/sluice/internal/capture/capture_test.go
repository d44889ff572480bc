package capture

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// segment is an IP packet with a TCP header.
func segment(from, to string) []byte {
	a, b := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, a.Port()), b.Port())
	if a.Addr().Is4() {
		p := append([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, tcp, 0, 0}, append(a.Addr().AsSlice(), b.Addr().AsSlice()...)...)
		return append(append(p, ports...), make([]byte, 16)...)
	}
	p := append([]byte{0x60, 0, 0, 0, 0, 20, tcp, 64}, append(a.Addr().AsSlice(), b.Addr().AsSlice()...)...)
	return append(append(p, ports...), make([]byte, 16)...)
}

// extended is an IPv6 packet with an extension header before what it carries.
func extended(p []byte, kind byte, header ...byte) []byte {
	out := bytes.Clone(p[:40])
	out[6] = kind
	return append(append(out, append([]byte{p[6]}, header...)...), p[40:]...)
}

// quoting is an ICMP error about a packet.
func quoting(p []byte) []byte {
	out := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, icmp, 0, 0}, 10, 9, 9, 9, 10, 1, 0, 2)
	return append(append(out, 3, 1, 0, 0, 0, 0, 0, 0), p...)
}

func TestParse(t *testing.T) {
	v4, v6 := segment("10.1.0.2:4711", "10.96.0.10:80"), segment("[fd00::2]:4711", "[fd00::a]:80")
	of := func(a, b string) leg { return legOf(tcp, netip.MustParseAddrPort(a), netip.MustParseAddrPort(b)) }
	want4, want6 := of("10.1.0.2:4711", "10.96.0.10:80"), of("[fd00::2]:4711", "[fd00::a]:80")
	later := bytes.Clone(v4)
	later[7] = 1
	for _, c := range []struct {
		what   string
		packet []byte
		want   leg
		ok     bool
	}{
		{"IPv4", v4, want4, true},
		{"the way back", segment("10.96.0.10:80", "10.1.0.2:4711"), want4, true},
		{"IPv6", v6, want6, true},
		{"IPv6 with options", extended(v6, 60, make([]byte, 7)...), want6, true},
		{"the first fragment of IPv6", extended(v6, 44, 0, 0, 1, 0, 0, 0, 9), want6, true},
		{"a later fragment of IPv6", extended(v6, 44, 0, 1, 1, 0, 0, 0, 9), leg{}, false},
		{"a later fragment of IPv4", later, leg{}, false},
		{"an ICMP error", quoting(v4), want4, true},
		{"an ICMP error about an ICMP error", quoting(quoting(v4)), leg{}, false},
		{"nothing", nil, leg{}, false},
	} {
		if got, ok := parse(c.packet); got != c.want || ok != c.ok {
			t.Errorf("%s: %v, %t", c.what, got, ok)
		}
	}
}

// FuzzParse: no packet makes the parser panic, and a leg that it finds is the same without what
// follows its ports.
func FuzzParse(f *testing.F) {
	f.Add(segment("10.1.0.2:4711", "10.96.0.10:80"))
	f.Add(extended(segment("[fd00::2]:4711", "[fd00::a]:80"), 60, make([]byte, 7)...))
	f.Add(quoting(segment("10.1.0.2:4711", "10.96.0.10:80")))
	f.Fuzz(func(t *testing.T, p []byte) {
		l, ok := parse(p)
		if again, okAgain := parse(append(bytes.Clone(p), 1, 2, 3)); ok && (!okAgain || again != l) {
			t.Errorf("%v, then %v", l, again)
		}
	})
}

// A packet is taken if its connection lived at its time: the last connection of a port does not
// take what the one before was sent, unless that matches too.
func TestFlowsTakeWhatLivedThen(t *testing.T) {
	start := time.Now().Add(-time.Minute)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	l := legOf(tcp, netip.MustParseAddrPort("10.1.0.2:4711"), netip.MustParseAddrPort("10.96.0.10:80"))
	back := legOf(tcp, netip.MustParseAddrPort("10.1.0.2:20001"), netip.MustParseAddrPort("10.2.0.2:8080"))
	tried := legOf(tcp, netip.MustParseAddrPort("10.1.0.2:20000"), netip.MustParseAddrPort("10.2.0.3:8080"))
	c := api.Connection{Time: at(10), Protocol: "TCP", Client: "10.1.0.2:4711", VIP: "10.96.0.10:80", SourceAddr: "10.1.0.2:20001", Endpoint: "10.2.0.2:8080", Event: "open",
		Failed: []api.Attempt{{Endpoint: "10.2.0.3:8080"}}}
	f := NewFlows()
	f.Add(&c)
	c.Event, c.DurationUS = "", 5_000_000
	f.Add(&c)
	for _, o := range []struct {
		leg  leg
		at   float64
		want bool
	}{
		{l, 8, false}, {l, 9.5, true}, {l, 15.5, true}, {l, 17, false},
		{back, 12, true}, {back, 17, false}, {tried, 11, true}, {tried, 8, false},
		{legOf(tcp, l.a, back.b), 12, false},
	} {
		check.Equalf(t, f.take(o.leg, at(o.at)), o.want, "%v after %v s", o.leg, o.at)
	}
	if n, _ := f.Count(); n != 1 {
		t.Errorf("%d connections", n)
	}
	f.forget(at(20))
	check.Equalf(t, len(f.legs), 0, "%v stay", f.legs)
	c.Time, c.Event = at(30), "open"
	f.Add(&c)
	if n, _ := f.Count(); n != 2 || f.take(l, at(12)) || !f.take(l, at(50)) {
		t.Error("the next connection of the port is not told from the one before")
	}
}

// Packets wait until their connection is known, or memory is full, and are written in order.
func TestPacketsWait(t *testing.T) {
	var out bytes.Buffer
	file := must.Get(NewFile(&out, 256))(t)
	head := out.Len()
	begin := time.Now()
	c := New(nil, NewFlows(), file, Bounds{Wait: time.Second, Memory: 10 * (overhead + 40), Size: 1000})
	add := func(after time.Duration) {
		c.add(&sys.Captured{Time: begin.Add(after), Data: segment("10.1.0.2:4711", "10.96.0.10:80"), Wire: 40})
	}
	add(0)
	add(time.Second)
	c.flows.Add(&api.Connection{Time: begin, Protocol: "TCP", Client: "10.1.0.2:4711", VIP: "10.96.0.10:80", State: "open"})
	if err := c.judge(begin.Add(time.Second / 2)); err != nil || c.result.Packets != 1 {
		t.Errorf("%+v, %v", c.result, err)
	}
	const record = recordHeader + linkHeader + 40
	if out.Len() != head+record || c.file.Written() != int64(out.Len()) {
		t.Errorf("%d bytes of a packet", out.Len()-head)
	}
	for range 12 {
		add(2 * time.Second)
	}
	if err := c.judge(begin); err != nil || c.result.Packets != 4 || c.result.Early != 3 {
		t.Errorf("%+v, %v", c.result, err)
	}
	if err := c.judge(time.Time{}); err != errFull || out.Len() > 1000 || out.Len() < 1000-record {
		t.Errorf("%v at %d bytes", err, out.Len())
	}
}
