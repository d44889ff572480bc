package demo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// onStage runs the program again with the arguments, in a network namespace of its
// own, and in a user namespace of its own unless root's rights are at hand. The files
// are its descriptors from 3 on. It gets SIGTERM when ctx ends, and when this
// process does. A process that ended by itself has said why.
func onStage(ctx context.Context, args []string, files ...*os.File) error {
	runtime.LockOSThread() // the end of this thread would be taken for that of the process
	defer runtime.UnlockOSThread()
	root := os.Geteuid() == 0
	cmd := stageCommand(ctx, !root, args, files)
	err := cmd.Start()
	if root && errors.Is(err, fs.ErrPermission) {
		// Root of a container without CAP_SYS_ADMIN is in the same place as
		// anybody else.
		cmd = stageCommand(ctx, true, args, files)
		err = cmd.Start()
	}
	if err != nil {
		return explain(err, readSettings(root))
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, context.Canceled):
		return nil // it ended in order
	case !errors.As(err, &exit):
		return err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return fmt.Errorf("the demo was ended by the signal %q", ws.Signal())
	}
	return ErrFailed
}

func stageCommand(ctx context.Context, user bool, args []string, files []*os.File) *exec.Cmd {
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Args[0] = os.Args[0]
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM}
	if user {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	return cmd
}

// settings are what the machine says about namespaces, by the names of its
// sysctls; those that the kernel does not have are left out. The name "root"
// reports whether the demo runs with root's own rights.
type settings map[string]string

func readSettings(root bool) settings {
	list := settings{"root": strconv.FormatBool(root)}
	for _, name := range []string{cloneSysctl, apparmorSysctl, maxUserSysctl, maxNetSysctl} {
		if b, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/")); err == nil {
			list[name] = strings.TrimSpace(string(b))
		}
	}
	return list
}

const (
	cloneSysctl    = "kernel.unprivileged_userns_clone"             // Debian and others
	apparmorSysctl = "kernel.apparmor_restrict_unprivileged_userns" // Ubuntu
	maxUserSysctl  = "user.max_user_namespaces"
	maxNetSysctl   = "user.max_net_namespaces"
)

// explain adds what to do to an error of making or furnishing namespaces.
func explain(err error, s settings) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("a network of the demo's own: %w", err)
	if advice := advise(err, s); advice != "" {
		err = fmt.Errorf("%w\n%s", err, advice)
	}
	return err
}

func advise(err error, s settings) string {
	forbidden, full := errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EUSERS)
	root := s["root"] == "true"
	switch {
	case forbidden && !root && s[cloneSysctl] == "0":
		return "This kernel keeps user namespaces for root. Allow them with `sudo sysctl " + cloneSysctl + "=1`, or run the demo with sudo."
	case forbidden && !root && s[apparmorSysctl] == "1":
		return "AppArmor takes the rights out of user namespaces. Allow them with `sudo sysctl " + apparmorSysctl + "=0`, or run the demo with sudo."
	case (forbidden || full) && s[maxUserSysctl] == "0":
		return "User namespaces are switched off. Allow them with `sudo sysctl " + maxUserSysctl + "=15000`, or run the demo with sudo."
	case full && s[maxNetSysctl] == "0":
		return "Network namespaces are switched off. Allow them with `sudo sysctl " + maxNetSysctl + "=15000`."
	case full:
		return "There are too many namespaces, or they are nested too deeply: see `sysctl " + maxUserSysctl + " " + maxNetSysctl + "`."
	case forbidden && root:
		return "This looks like a container that may not make namespaces. It needs CAP_SYS_ADMIN and CAP_NET_ADMIN: docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN, or --privileged."
	case forbidden:
		return "Something forbids user namespaces here, such as a container's seccomp profile. Run the demo with sudo, or outside of the container."
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOSYS):
		return "This kernel was built without network namespaces (CONFIG_NET_NS) or user namespaces (CONFIG_USER_NS)."
	case errors.Is(err, syscall.EOPNOTSUPP):
		return "This kernel lacks veth interfaces (CONFIG_VETH)."
	}
	return ""
}

// rootless reports whether the process lives in a user namespace that onStage
// made.
func rootless() bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	fields := strings.Fields(string(b))
	return err == nil && len(fields) == 3 && fields[0] == "0" && fields[2] == "1"
}
