package sys

import (
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// SendFiles writes p, which must not be empty, and sends the files to the peer
// process. They stay open in this process.
func SendFiles(c *net.UnixConn, p []byte, files ...*os.File) error {
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	n, _, err := c.WriteMsgUnix(p, unix.UnixRights(fds...), nil)
	if err == nil && n < len(p) {
		_, err = c.Write(p[n:])
	}
	return err
}

// ReceiveFiles reads the data of one SendFiles and returns the files with it, at
// most limit. Their descriptors are close-on-exec.
func ReceiveFiles(c *net.UnixConn, p []byte, limit int) (n int, files []*os.File, err error) {
	n, fds, whole, err := ReceiveDescriptors(c, p, limit)
	if err != nil {
		return n, nil, err
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), fmt.Sprintf("received %d", fd)))
	}
	if !whole || len(files) > limit {
		for _, f := range files {
			_ = f.Close()
		}
		return n, nil, fmt.Errorf("more than %d files", limit)
	}
	return n, files, nil
}

// SendDescriptors writes one packet, which must not be empty, with descriptors, 253 at
// most. They stay open in this process.
func SendDescriptors(c *net.UnixConn, p []byte, fds []int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(p, rights, nil)
	return err
}

// ReceiveDescriptors reads the data of one send and returns the descriptors with it, which
// are close-on-exec. whole is false if p or limit is too small, or if the kernel dropped
// descriptors: at the limit of open files it does so without an error.
func ReceiveDescriptors(c *net.UnixConn, p []byte, limit int) (n int, fds []int, whole bool, err error) {
	oob := make([]byte, unix.CmsgSpace(4*limit))
	n, used, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return n, nil, false, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:used])
	if err != nil {
		return n, nil, false, fmt.Errorf("control message: %w", err)
	}
	for i := range messages {
		if more, err := unix.ParseUnixRights(&messages[i]); err == nil { // else it is not about files
			fds = append(fds, more...)
		}
	}
	return n, fds, flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) == 0, nil
}

// Duplicate returns another descriptor of a connection or a listening socket, close-on-exec.
// Unlike File, it leaves O_NONBLOCK alone, which both descriptors share.
func Duplicate(c syscall.Conn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	var got error
	if err := raw.Control(func(old uintptr) { fd, got = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return -1, err
	}
	return fd, got
}
