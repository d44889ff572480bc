package sys

import (
	"io"

	"golang.org/x/sys/unix"
)

// WriteMemoryFile returns the descriptor of a new file in memory that holds p.
func WriteMemoryFile(p []byte) (fd int, err error) {
	fd, err = unix.MemfdCreate("sluice", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate("sluice", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return -1, err
	}
	n, err := unix.Pwrite(fd, p, 0)
	if err == nil && n != len(p) {
		err = io.ErrShortWrite
	}
	if err != nil {
		Close(fd)
		return -1, err
	}
	return fd, nil
}

// ReadMemoryFile returns what a file in memory holds, if that is n bytes, and nil if not.
func ReadMemoryFile(fd, n int) []byte {
	var st unix.Stat_t
	if n <= 0 || unix.Fstat(fd, &st) != nil || st.Size != int64(n) {
		return nil
	}
	p := make([]byte, n)
	if got, _ := unix.Pread(fd, p, 0); got != n {
		return nil
	}
	return p
}
