package sys

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// PeerPID gives the process at the other end of a connected unix socket: the
// one that connected, or the one that began to listen. It is 0 when that
// process is in a PID namespace that this one cannot see into.
func PeerPID(conn syscall.Conn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}
