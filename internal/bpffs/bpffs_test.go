package bpffs_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// Each proxy has a directory of its own, which goes with its last pin.
func TestDirectoriesOfProxies(t *testing.T) {
	root := netns.MountBPF(t)
	other := netns.New(t, "other")
	var all []bpffs.Dir
	for _, p := range []struct {
		name      string
		namespace int
	}{{"sluice", 0}, {"sluice", other.FD()}, {"second", 0}, {"a.b/../c", 0}} {
		d := must.Get(bpffs.Of(root, p.name, p.namespace))(t)
		if slices.Contains(all, d) {
			t.Errorf("%s twice", d)
		}
		check.OKf(t, errors.Join(d.Make(), d.Make()), "%s", p.name)
		all = append(all, d)
	}
	if found, err := all[0].Siblings(); err != nil || len(found) != len(all) {
		t.Errorf("%v, %v, want %v", found, err, all)
	}
	must.OK(t, os.Mkdir(all[0].Pin("pin"), 0o700))
	for _, d := range all {
		d.Remove()
	}
	check.EqualSlicesf(t, must.Get(all[0].Siblings())(t), all[:1], "while something is pinned")
	must.OK(t, os.Remove(all[0].Pin("pin")))
	all[0].Remove()
	check.ErrorIsf(t, must.Err(os.Lstat(filepath.Dir(string(all[0])))), os.ErrNotExist, "the directory of all")
}

// What is no BPF file system, and a directory of another user, is not used.
func TestPlacesThatAreNotUsed(t *testing.T) {
	for root, want := range map[string]string{
		"":                                 "--bpf-root is empty",
		t.TempDir():                        "no BPF file system is mounted at",
		filepath.Join(t.TempDir(), "none"): "no BPF file system is mounted at",
	} {
		check.Errorf(t, must.Err(bpffs.Of(root, "sluice", 0)), want, "%q", root)
	}
	root := netns.MountBPF(t)
	d := must.Get(bpffs.Of(root, "sluice", 0))(t)
	must.OK(t, d.Make())
	must.OK(t, os.Chmod(filepath.Dir(string(d)), 0o777))
	check.Errorf(t, d.Make(), "belongs to another user", "a directory that all may write to")
	must.OK(t, unix.MountSetattr(unix.AT_FDCWD, root, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}))
	check.Errorf(t, must.Err(bpffs.Of(root, "sluice", 0)), "is read-only", "where nothing can be pinned")
}
