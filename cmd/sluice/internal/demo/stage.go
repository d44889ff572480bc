package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// stage is the process that plays the demo, in namespaces of its own. This
// process only waits for it, passes signals on, and clears up what is left.
type stage struct {
	cmd *exec.Cmd
}

// newStage starts the program again with the arguments, in a network namespace
// of its own, and in a user namespace of its own unless root's rights are at
// hand. The file, if there is one, is its descriptor 3. It gets SIGTERM when
// the thread that newStage was called on ends: lock it until wait has returned.
func newStage(args []string, file *os.File) (*stage, error) {
	root := os.Geteuid() == 0
	if root {
		s, err := startStage(false, args, file)
		if !errors.Is(err, fs.ErrPermission) {
			return s, explain(err, readSettings(root))
		}
		// Root of a container without CAP_SYS_ADMIN is in the same place as
		// anybody else.
	}
	s, err := startStage(true, args, file)
	return s, explain(err, readSettings(root))
}

func startStage(user bool, args []string, file *os.File) (*stage, error) {
	s := &stage{cmd: exec.Command(self, args...)}
	s.cmd.Args[0] = os.Args[0]
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if file != nil {
		s.cmd.ExtraFiles = []*os.File{file}
	}
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM}
	if user {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	s.cmd.SysProcAttr = attr
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	return s, nil
}

// wait passes signals on until the process ends, and returns an error if it did
// not end with exit status 0. A process that ended by itself has said why.
func (s *stage) wait() error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	ended := make(chan struct{})
	defer close(ended)
	go s.forward(signals, ended)
	err := s.cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return fmt.Errorf("the demo was ended by the signal %q", ws.Signal())
	}
	return ErrFailed
}

func (s *stage) forward(signals <-chan os.Signal, ended <-chan struct{}) {
	for {
		select {
		case sig := <-signals:
			_ = s.cmd.Process.Signal(sig) // an error means that it has ended
		case <-ended:
			return
		}
	}
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

// rootless reports whether the process lives in a user namespace that newStage
// made.
func rootless() bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	fields := strings.Fields(string(b))
	return err == nil && len(fields) == 3 && fields[0] == "0" && fields[2] == "1"
}
