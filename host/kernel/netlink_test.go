package kernel

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"github.com/mdlayher/netlink"
	vnetlink "github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Attributes are read as another library writes them, and broken ones end the walk.
func TestAttributes(t *testing.T) {
	b, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: 1, Data: []byte("one")}, {Type: netlink.Nested | 2, Data: []byte("second")}, {Type: 1, Data: []byte("again")},
	})
	must.OK(t, err)
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

// A list that changes meanwhile is asked for again, but not for ever.
func TestUninterrupted(t *testing.T) {
	for changes, want := range map[int]error{0: nil, 3: nil, 1000: vnetlink.ErrDumpInterrupted} {
		asked := 0
		n, err := Uninterrupted(func() (int, error) {
			if asked++; asked <= changes {
				return 0, vnetlink.ErrDumpInterrupted
			}
			return 7, nil
		})
		if !errors.Is(err, want) || err == nil && n != 7 || asked > 100 {
			t.Errorf("%d changes: %d, %v after %d questions", changes, n, err, asked)
		}
	}
	asked := 0
	if _, err := Uninterrupted(func() (int, error) { asked++; return 0, syscall.EPERM }); err != syscall.EPERM || asked != 1 {
		t.Errorf("another error: %v after %d questions", err, asked)
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
