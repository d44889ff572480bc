package sys

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenerCredentials returns the credentials of the process that listens at the
// name of a unix socket. The PID is 0 if that process is in a PID namespace that is
// not visible here. It does not wait: a full accept queue is an error.
func ListenerCredentials(name string) (*unix.Ucred, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return nil, err
	}
	return unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
}

// PeerCredentials returns the credentials of the process that made, or listens for, a
// connected unix socket.
func PeerCredentials(c syscall.Conn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var got error
	if err := raw.Control(func(fd uintptr) { cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	return cred, got
}

// IsNetAdmin reports whether a process of a user has CAP_NET_ADMIN in this
// process's user namespace. It returns an error if that is not visible.
func IsNetAdmin(pid int, uid uint32) (bool, error) {
	dir := "/proc/" + strconv.Itoa(pid)
	own, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		return false, err
	}
	theirs, err := os.Readlink(dir + "/ns/user")
	if err != nil {
		return false, err
	}
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return false, err
	}
	sameUser, capable := false, false
	for line := range strings.Lines(string(status)) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "Uid:":
			sameUser = words[2] == fmt.Sprint(uid)
		case len(words) == 2 && words[0] == "CapEff:":
			set, err := strconv.ParseUint(words[1], 16, 64)
			if err != nil {
				return false, fmt.Errorf("capabilities of process %d: %w", pid, err)
			}
			capable = set&(1<<unix.CAP_NET_ADMIN) != 0
		}
	}
	return own == theirs && sameUser && capable, nil
}
