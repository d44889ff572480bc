package sys

import "golang.org/x/sys/unix"

// TrySCTP returns nil if the kernel supports SCTP sockets, or else the reason. The
// kernel may load a module.
func TrySCTP() error {
	fd, e := socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if e != 0 {
		return e
	}
	Close(fd)
	return nil
}
