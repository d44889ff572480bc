// Package bpffs gives each proxy a directory of its own in the BPF file system, where
// BPF objects are pinned that are to outlive the process:
//
//	d, err := bpffs.Of("/sys/fs/bpf", "sluice", namespace)
//	err = d.Make()
//	link.Pin(d.Pin("sk_lookup"))
//
// It mounts no file system. Hosts mount it at /sys/fs/bpf, and a container needs
// that directory of its host: a mount of its own would end with it.
package bpffs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// DefaultRoot is where Linux distributions mount the BPF file system.
const DefaultRoot = "/sys/fs/bpf"

// parent holds the directories of all proxies.
const parent = "sluice"

// ErrOff is the error of an empty root.
var ErrOff = errors.New("no BPF file system is used (--bpf-root is empty)")

// Dir is the path of a proxy's directory.
type Dir string

// Of returns the directory of the proxy with a name in a network namespace, of which
// namespace is the descriptor; 0 is the process's own. It makes nothing. An error
// says that there is no BPF file system at root.
func Of(root, proxy string, namespace int) (Dir, error) {
	if err := Check(root); err != nil {
		return "", err
	}
	inode, err := sys.NetNSInode(namespace)
	if err != nil {
		return "", err
	}
	return Dir(filepath.Join(root, parent, fmt.Sprintf("%s-%d", escape(proxy), inode))), nil
}

// Check returns the error of a root that is not in a BPF file system, or in one that is read-only.
func Check(root string) error {
	if root == "" {
		return ErrOff
	}
	is, writable, err := sys.IsBPFFS(root)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && !is:
		return fmt.Errorf("no BPF file system is mounted at %s", root)
	case err != nil:
		return fmt.Errorf("BPF file system: %w", err)
	case !writable:
		return fmt.Errorf("the BPF file system at %s is read-only", root)
	}
	return nil
}

// escape replaces what a name in the BPF file system must not contain: dots and
// slashes.
func escape(name string) string {
	var b strings.Builder
	for i := range len(name) {
		c := name[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02x", c)
		}
	}
	return b.String()
}

// Make creates the directory. It refuses one that another user could write to: the
// root may be writable for all.
func (d Dir) Make() error {
	for _, path := range []string{filepath.Dir(string(d)), string(d)} {
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := private(path); err != nil {
			return err
		}
	}
	return nil
}

// private returns an error if another user may change what is in a directory.
func private(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || info.Mode().Perm()&0o022 != 0 || st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to another user", path)
	}
	return nil
}

// Pin returns the path of a pin, whose name has neither dots nor slashes.
func (d Dir) Pin(name string) string { return filepath.Join(string(d), name) }

// Remove removes the directory if nothing is in it any more, and so that of all
// proxies.
func (d Dir) Remove() {
	if os.Remove(string(d)) == nil {
		_ = os.Remove(filepath.Dir(string(d)))
	}
}

// Siblings returns the directories of all proxies beside this one, it among them if
// it is there: of other network namespaces, and of such that are gone.
func (d Dir) Siblings() ([]Dir, error) {
	entries, err := os.ReadDir(filepath.Dir(string(d)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []Dir
	for _, e := range entries {
		all = append(all, Dir(filepath.Join(filepath.Dir(string(d)), e.Name())))
	}
	return all, nil
}
