package sys

import "golang.org/x/sys/unix"

// TrySCTP tells why there are no SCTP sockets here; nil if there are. The kernel
// may load a module for it.
func TrySCTP() error {
	fd, e := socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if e != 0 {
		return e
	}
	Close(fd)
	return nil
}
