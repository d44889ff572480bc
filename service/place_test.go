package service

import (
	"testing"
	"unsafe"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestPlace: an endpoint says where it runs whichever of the two names is known, and holds no more
// than a pointer for it: a cluster may have a million endpoints.
func TestPlace(t *testing.T) {
	for _, names := range [][2]string{{"", ""}, {"node", ""}, {"", "zone"}, {"node", "zone"}} {
		e := Endpoint{Place: At(names[0], names[1])}
		if e.Node() != names[0] || e.Zone() != names[1] || e.InCluster() != (names[0] != "") {
			t.Errorf("%q: node %q, zone %q, in the cluster: %v", names, e.Node(), e.Zone(), e.InCluster())
		}
		check.Equalf(t, At(names[0], names[1]), e.Place, "%q: two places", names)
	}
	if size := unsafe.Sizeof(Endpoint{}); unsafe.Sizeof(uintptr(0)) == 8 && size > 104 {
		t.Errorf("an endpoint takes %d bytes, want 104 at most", size)
	}
}
