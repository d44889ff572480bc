//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	// containedEnv makes the test's own program the last step into a container:
	// the directory that becomes its root.
	containedEnv = "SLUICE_TEST_CONTAINER"
	// grantedEnv lists its capabilities, separated by blanks.
	grantedEnv = "SLUICE_TEST_CAPABILITIES"
)

var capabilities = map[string]int{
	"BPF": unix.CAP_BPF, "NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "NET_RAW": unix.CAP_NET_RAW,
}

// startContained starts the program as the only one of its file system, which is
// read-only, beside a kubeconfig, which takes the place of a service account
// here. It has these capabilities and can get no others.
func (w *world) startContained(name string, granted []string) *netns.Cmd {
	w.t.Helper()
	const script = `set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir -p "$1/proc" "$1/sys" "$1/etc/kubernetes" "$1/usr/local/bin"
cp "$2" "$1/usr/local/bin/sluice"
cp "$3" "$1/etc/kubernetes/kubeconfig"
mount -t proc -o nosuid,nodev,noexec proc "$1/proc"
mount -o bind /proc/sys "$1/proc/sys"
mount -o remount,bind,ro "$1/proc/sys"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$1/sys"
mount -o remount,ro "$1"
program=$4
shift 4
exec "$program" "$@"
`
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	root := filepath.Join(w.t.TempDir(), "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		w.t.Fatal(err)
	}
	return w.start(name, "env", containedEnv+"="+root, grantedEnv+"="+strings.Join(granted, " "),
		"unshare", "--mount", "sh", "-c", script, "sh", root, os.Getenv("SLUICE_BIN"), w.kubeconfig("sluice"), self,
		"run", "--kubeconfig", "/etc/kubernetes/kubeconfig", "--hostname-override", "node", "--detect-local-mode=NodeCIDR",
		"--healthz-port=0", "--metrics-port=0", "--access-log", "off", "-v", "4")
}

// enterContainer becomes the program in the container.
func enterContainer() error {
	runtime.LockOSThread() // capabilities are a thread's
	if err := unix.Chroot(os.Getenv(containedEnv)); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	var granted []int
	for _, name := range strings.Fields(os.Getenv(grantedEnv)) {
		number, ok := capabilities[name]
		if !ok {
			return fmt.Errorf("capability %s is not known here", name)
		}
		granted = append(granted, number)
	}
	for c := range unix.CAP_LAST_CAP + 1 {
		if slices.Contains(granted, c) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	return syscall.Exec("/usr/local/bin/sluice", append([]string{"sluice"}, os.Args[1:]...), []string{"PATH=/usr/local/bin"})
}
