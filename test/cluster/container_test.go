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

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	// containedEnv makes the test's own program enter a container: it names the
	// container's root directory.
	containedEnv = "SLUICE_TEST_CONTAINER"
	// grantedEnv lists its capabilities, separated by spaces.
	grantedEnv = "SLUICE_TEST_CAPABILITIES"
	// variablesEnv lists its environment variables, separated by spaces.
	variablesEnv = "SLUICE_TEST_VARIABLES"
)

// everything is the capabilities of a privileged container.
const everything = "ALL"

var capabilities = map[string]int{
	"BPF": unix.CAP_BPF, "CHOWN": unix.CAP_CHOWN, "NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "NET_RAW": unix.CAP_NET_RAW,
	"PERFMON": unix.CAP_PERFMON,
}

// container is the program's environment: a read-only file system with only the
// program and these files, and only these capabilities.
type container struct {
	name    string
	files   map[string]string // by path inside: the file's path outside
	granted []string
	env     []string // beside PATH
	args    []string
	pins    string // the node's BPF file system, if it is not one of its own
	run     string // the node's folder that is /run/sluice; none: it cannot write there
	// apart gives it a PID namespace, as runtimes do; the process that is returned is then its
	// parent, which passes no signal on.
	apart bool
}

// startContained starts the program in a container.
func (w *world) startContained(c container) *netns.Cmd {
	w.t.Helper()
	const script = `set -e
root=$1
shift
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir -p "$root/proc" "$root/sys" "$root/bpf"
while [ "$1" != -- ]; do
	mkdir -p "$root$(dirname "$2")"
	cp "$1" "$root$2"
	shift 2
done
shift
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -o bind /proc/sys "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
if [ -n "$pins" ]; then
	mount -o bind "$pins" "$root/bpf"
else
	mount -t bpf -o mode=700 bpf "$root/bpf"
fi
if [ -n "$run" ]; then
	mkdir -p "$root/run/sluice"
	mount -o bind "$run" "$root/run/sluice"
fi
mount -o remount,ro "$root"
exec "$@"
`
	self := must.Get(os.Executable())(w.t)
	root := filepath.Join(w.t.TempDir(), "root")
	must.OK(w.t, os.Mkdir(root, 0o755))
	command := []string{containedEnv + "=" + root, grantedEnv + "=" + strings.Join(c.granted, " "), variablesEnv + "=" + strings.Join(c.env, " "),
		"pins=" + c.pins, "run=" + c.run, "unshare", "--mount"}
	if c.apart {
		command = append(command, "--pid", "--fork", "--kill-child")
	}
	command = append(command, "sh", "-c", script, "sh", root, os.Getenv("SLUICE_BIN"), containedProgram)
	for inside, file := range c.files {
		command = append(command, file, inside)
	}
	command = append(append(command, "--", self), c.args...)
	return w.start(c.name, "env", command...)
}

// containedProgram is the program's path in a container.
const containedProgram = "/usr/local/bin/sluice"

// enterContainer starts the program in the container.
func enterContainer() error {
	runtime.LockOSThread() // capabilities belong to a thread
	if err := unix.Chroot(os.Getenv(containedEnv)); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	var granted []int
	for _, name := range strings.Fields(os.Getenv(grantedEnv)) {
		if name == everything {
			break
		}
		number, ok := capabilities[name]
		if !ok {
			return fmt.Errorf("capability %s is not known here", name)
		}
		granted = append(granted, number)
	}
	for c := range unix.CAP_LAST_CAP + 1 {
		if slices.Contains(granted, c) || os.Getenv(grantedEnv) == everything {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	return syscall.Exec(containedProgram, append([]string{"sluice"}, os.Args[1:]...), append([]string{"PATH=/usr/local/bin"}, strings.Fields(os.Getenv(variablesEnv))...))
}

// terminate sends SIGTERM to the program of a container with a PID namespace, as a kubelet does.
func (w *world) terminate(cmd *netns.Cmd) {
	w.t.Helper()
	text := must.Read(w.t, fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
	var pid int
	must.OKf(w.t, must.Err(fmt.Sscan(string(text), &pid)), "children of the container's parent: %q", text)
	must.OK(w.t, syscall.Kill(pid, syscall.SIGTERM))
}
