package sklookup

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// A pinned program refuses once its process is killed, also where a server of the
// host listens on all addresses (F4), until the next process takes it over.
func TestPinnedProgramRefusesForAKilledProcess(t *testing.T) {
	lab := netns.NewLab(t, 0)
	root := netns.MountBPF(t)
	web := []service.Destination{web4, web6}
	all := web
	for _, d := range web {
		d.Protocol = service.UDP
		all = append(all, d)
	}
	lab.Node.EchoTCP(t, 80)
	lab.Node.EchoUDP(t, 80)
	reach := func(what string, to []service.Destination, want func(service.Destination) string) {
		t.Helper()
		for _, from := range []*netns.Host{lab.Client, lab.Node} {
			for _, d := range to {
				steering.Expect(t, from, d, want(d), what)
			}
		}
	}
	refused := func(service.Destination) string { return steering.Refused }
	var before link.ID
	for _, round := range []string{"the first process", "the next one"} {
		t.Run(round, func(t *testing.T) { // its sockets end with it
			front := steering.NewFront(t, lab.Node, "front")
			r := newPinned(t, lab.Node, root)
			must.OK(t, r.Apply(steering.Plan(steering.Steer(front, all...))))
			reach(round, web, front.Says)
			info := must.Get(r.link.Info())(t)
			if before != 0 && info.ID != before {
				t.Error("it did not take over the link")
			}
			before = info.ID
			if repaired, err := r.Verify(); repaired || err != nil {
				t.Errorf("verify: %v, %v", repaired, err)
			}
			withoutDescriptors(t, func() {
				if repaired, err := r.pin.keep(r.link); repaired || err != nil {
					t.Errorf("a pin that cannot be read for want of descriptors: repaired %v, %v", repaired, err)
				}
			})
			must.OK(t, os.Remove(r.pin.dir.Pin(pinName)))
			if repaired, err := r.Verify(); !repaired || err != nil {
				t.Errorf("verify without the pin: %v, %v", repaired, err)
			}
			must.OK(t, r.link.Detach())
			if repaired, err := r.Verify(); !repaired || err != nil {
				t.Errorf("verify of a program that was detached: %v, %v", repaired, err)
			}
			if info, err := r.link.Info(); err == nil {
				before = info.ID
			}
			reach(round+", repaired", web, front.Says)
			kill(r)
		})
		reach("after "+round, all, refused)
	}
	if removed, err := Cleanup(pinnedOptions(lab.Node, root)); err != nil || len(removed) != 1 {
		t.Errorf("cleanup: %q, %v", removed, err)
	}
	for _, d := range web {
		if got := steering.Reach(t, lab.Client, d, ""); !strings.HasPrefix(got, "node:") {
			t.Errorf("after cleanup: %s: %q", d, got)
		}
	}
}

// withoutDescriptors calls f while this process can open no further descriptor.
func withoutDescriptors(t *testing.T, f func()) {
	t.Helper()
	var was unix.Rlimit
	must.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	must.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}))
	defer func() {
		must.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was))
	}()
	f()
}

// What stands in the way of a pin is told, and all else works. Pins of network
// namespaces that are gone are removed.
func TestPlacesOfPins(t *testing.T) {
	lab := netns.NewLab(t, 0)
	root := netns.MountBPF(t)
	gone := must.Get(sys.NewNetNS())(t)
	o := pinnedOptions(lab.Node, root)
	o.Routes.NetNS = int(gone.Fd())
	r := must.Get(New(o))(t)
	must.OK(t, r.Apply(redirect.Plan{}))
	dead := r.pin.dir
	kill(r)
	must.OK(t, gone.Close())
	own := must.Get(bpffs.Of(root, "sluice", lab.Node.FD()))(t)
	for _, c := range []struct {
		root, want string
		prepare    func() error
	}{
		{"", "--bpf-root is empty", nil},
		{t.TempDir(), "no BPF file system is mounted at", nil},
		{root, "", nil},
		{root, "belongs to another user", func() error { return os.Chmod(filepath.Dir(string(own)), 0o777) }},
	} {
		if c.prepare != nil {
			must.OK(t, errors.Join(own.Make(), c.prepare()))
		}
		r := newPinned(t, lab.Node, c.root)
		if err := r.Apply(redirect.Plan{}); err != nil {
			t.Errorf("%q: %v", c.root, err)
		}
		got := r.Unpinned()
		if (got == nil) != (c.want == "") || got != nil && !strings.Contains(got.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.root, got, c.want)
		}
		check.OK(t, r.Close())
		check.ErrorIsf(t, must.Err(os.Lstat(own.Pin(pinName))), os.ErrNotExist, "after Close")
	}
	check.ErrorIsf(t, must.Err(os.Lstat(string(dead))), os.ErrNotExist, "the directory of a network namespace that is gone")
}
