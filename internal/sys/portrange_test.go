package sys

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestReservedPortsAreRead(t *testing.T) {
	s := parsePorts("80,9000-9002,65535")
	in := map[uint16]bool{80: true, 9000: true, 9001: true, 9002: true, 65535: true}
	for p := range 1 << 16 {
		check.Equalf(t, s.Has(uint16(p)), in[uint16(p)], "port %d", p)
	}
	if none := parsePorts(""); none != nil || none.Has(80) {
		t.Error("an empty list has ports")
	}
	if got := s.Without(9000, 9003); len(got) != 1 || got[0] != 9003 {
		t.Errorf("9000 to 9003 without those: %v", got)
	}
	if got := s.Without(9000, 9002); len(got) != 3 {
		t.Errorf("a range that is reserved as a whole: %v", got)
	}
	for _, broken := range []string{"x", "1-", "-", "70000", "5-x"} {
		check.Equalf(t, *parsePorts(broken), PortSet{}, "%q has ports", broken)
	}
}
