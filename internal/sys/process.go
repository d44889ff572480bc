package sys

import (
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Signals and error numbers that programs around the data path use.
const (
	SIGHUP   = unix.SIGHUP
	SIGINT   = unix.SIGINT
	SIGQUIT  = unix.SIGQUIT
	SIGKILL  = unix.SIGKILL
	SIGTERM  = unix.SIGTERM
	SIGWINCH = unix.SIGWINCH

	ENOSPC     = unix.ENOSPC
	EUSERS     = unix.EUSERS
	EOPNOTSUPP = unix.EOPNOTSUPP
)

// NewNamespaces gives the attributes of a process that begins in an empty
// network namespace and gets the signal when the thread that started it ends:
// lock it. With user, the process is root of a new user namespace in which the
// caller's user and group are the only ones.
func NewNamespaces(user bool, death syscall.Signal) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: death}
	if user {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	return attr
}

// OwnGroup gives the attributes of a process that leads a process group, so
// that a terminal's Ctrl-C passes it by, and gets the signal when the thread
// that started it ends.
func OwnGroup(death syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: death}
}

// OwnSession is OwnGroup in a session of its own, without a terminal.
func OwnSession(death syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: death}
}

// SignalGroup signals each process of the group that pid leads.
func SignalGroup(pid int, s syscall.Signal) error { return unix.Kill(-pid, s) }

// Owner gives the user that owns a file; false if info does not come from the
// kernel.
func Owner(info fs.FileInfo) (uid int, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}

// DeathSignal gives the signal that ended a process, or 0 if it ended itself.
func DeathSignal(state *os.ProcessState) syscall.Signal {
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return ws.Signal()
	}
	return 0
}
