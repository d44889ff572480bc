package sockfilter

import (
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// A program of CompileClients looks at the client alone.
func TestCompileClients(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, c := range []struct {
		at      netip.Addr
		allowed []netip.Prefix
		from    string
		want    bool
	}{
		{v4, prefixes("10.0.0.0/8", "198.51.100.7/32"), "10.1.2.3", true},
		{v4, prefixes("10.0.0.0/8", "198.51.100.7/32"), "198.51.100.7", true},
		{v4, prefixes("10.0.0.0/8", "198.51.100.7/32"), "198.51.100.8", false},
		{v4, prefixes("2001:db8::/32"), "10.1.2.3", false},
		{v4, nil, "10.1.2.3", false},
		{v6, prefixes("fd00::/8", "2001:db8:2:1::5/128"), "fd12::1", true},
		{v6, prefixes("fd00::/8", "2001:db8:2:1::5/128"), "2001:db8:2:1::5", true},
		{v6, prefixes("fd00::/8", "2001:db8:2:1::5/128"), "2001:db8:2:1::6", false},
	} {
		program := must.Get(CompileClients(c.at, c.allowed))(t)
		for _, port := range []uint16{1, 3868} {
			check.Equalf(t, run(t, program, packet{netip.MustParseAddr(c.from), netip.AddrPortFrom(c.at, port)}), c.want, "%s among %v", c.from, c.allowed)
		}
	}
}

// NoAssociations drops INIT chunks only.
func TestNoAssociations(t *testing.T) {
	for chunk := range 256 {
		got := true
		acc := uint32(0)
		for pc := 0; pc < len(NoAssociations); pc++ {
			switch op := NoAssociations[pc]; op.Code {
			case sys.FilterLoadByte:
				acc = uint32([]byte{byte(chunk), 0, 0, 20}[op.K])
			case sys.FilterIfEqual:
				if acc == op.K {
					pc += int(op.Jt)
				} else {
					pc += int(op.Jf)
				}
			case sys.FilterReturn:
				got = op.K != 0
				pc = len(NoAssociations)
			default:
				t.Fatalf("code %#x", op.Code)
			}
		}
		check.Equalf(t, got, chunk != 1, "chunk %d: kept", chunk)
	}
}
