package sys

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestSockaddrRoundTrip(t *testing.T) {
	for _, c := range []struct{ in, out string }{
		{"10.96.0.10:80", "10.96.0.10:80"},
		{"0.0.0.0:0", "0.0.0.0:0"},
		{"255.255.255.255:65535", "255.255.255.255:65535"},
		{"[::ffff:10.0.0.1]:443", "10.0.0.1:443"},
		{"[fd00:10:96::a]:53", "[fd00:10:96::a]:53"},
		{"[::]:1", "[::]:1"},
		{"[fe80::1%7]:80", "[fe80::1%7]:80"},
		{"[fd00::1%7]:80", "[fd00::1]:80"}, // a zone says nothing there
	} {
		var s sockaddr
		s.put(netip.MustParseAddrPort(c.in))
		if got := s.get(); got.String() != c.out {
			t.Errorf("%s comes back as %s, want %s", c.in, got, c.out)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		var b16 [16]byte
		for i := range b16 {
			b16[i] = byte(rng.Uint32())
		}
		b16[0] = 0x20 // global
		for _, a := range []netip.Addr{netip.AddrFrom16(b16), netip.AddrFrom4([4]byte(b16[:4]))} {
			want := netip.AddrPortFrom(a, uint16(rng.Uint32()))
			var s sockaddr
			if s.put(want); s.get() != want {
				t.Fatalf("%s comes back as %s", want, s.get())
			}
		}
	}
	if got := new(sockaddr).get(); got.IsValid() {
		t.Fatalf("no address is %s", got)
	}
}
