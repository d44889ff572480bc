package sys

import "testing"

func TestReservedPortsAreRead(t *testing.T) {
	s := parsePorts("80,9000-9002,65535")
	in := map[uint16]bool{80: true, 9000: true, 9001: true, 9002: true, 65535: true}
	for p := range 1 << 16 {
		if got := s.Has(uint16(p)); got != in[uint16(p)] {
			t.Errorf("port %d: %v", p, got)
		}
	}
	if none := parsePorts(""); none != nil || none.Has(80) {
		t.Error("an empty list has ports")
	}
	for _, broken := range []string{"x", "1-", "-", "70000", "5-x"} {
		if *parsePorts(broken) != (PortSet{}) {
			t.Errorf("%q has ports", broken)
		}
	}
}
