package kernel

import (
	"bytes"
	"testing"

	"github.com/mdlayher/netlink"
)

// Attributes are read as another library writes them, and broken ones end the walk.
func TestAttributes(t *testing.T) {
	b, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: 1, Data: []byte("one")}, {Type: netlink.Nested | 2, Data: []byte("second")}, {Type: 1, Data: []byte("again")},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := Attribute(b, 1); string(got) != "one" {
		t.Errorf("the first of two: %q", got)
	}
	if got := Attribute(b, 2); string(got) != "second" {
		t.Errorf("nested: %q", got)
	}
	if got := Attribute(b, 3); got != nil {
		t.Errorf("none: %q", got)
	}
	for _, broken := range [][]byte{nil, b[:3], {3, 0, 1, 0}, {200, 0, 1, 0}} {
		for kind, value := range Attributes(broken) {
			t.Errorf("%v: %d %v", broken, kind, value)
		}
	}
}

func FuzzAttributes(f *testing.F) {
	f.Add([]byte{5, 0, 1, 0, 7, 0, 0, 0, 4, 0, 2, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, value := range Attributes(b) {
			if len(value) > 0 && !bytes.Contains(b, value) {
				t.Errorf("%v has no %v", b, value)
			}
		}
	})
}
