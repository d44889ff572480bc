package redirect

import (
	"errors"
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func TestOneProxyInANetworkNamespace(t *testing.T) {
	a, b := netns.New(t, "a"), netns.New(t, "b")
	lock := func(n *netns.Namespace, name string) (l *Lock, err error) {
		_ = n.Do(func() error {
			l, err = AcquireLock(name)
			return nil
		})
		return l, err
	}
	first, err := lock(a, "sluice")
	if err != nil {
		t.Fatal(err)
	}
	var locked *LockedError
	if _, err := lock(a, "sluice"); !errors.As(err, &locked) || locked.PID != os.Getpid() {
		t.Errorf("second one: got %v, want an error that names process %d", err, os.Getpid())
	}
	for _, c := range []struct {
		ns   *netns.Namespace
		name string
	}{{b, "sluice"}, {a, "other"}} {
		l, err := lock(c.ns, c.name)
		if err != nil {
			t.Errorf("%s in %s: %v", c.name, c.ns.Name(), err)
			continue
		}
		defer l.Release()
	}
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	again, err := lock(a, "sluice")
	if err != nil {
		t.Fatalf("after the release: %v", err)
	}
	_ = again.Release()
}
