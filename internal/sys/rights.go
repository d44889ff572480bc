package sys

import (
	"fmt"
	"net"
	"os"

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
	oob := make([]byte, unix.CmsgSpace(4*limit))
	n, used, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return n, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:used])
	if err != nil {
		return n, nil, fmt.Errorf("control message: %w", err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // not about files
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), fmt.Sprintf("received %d", fd)))
		}
	}
	if flags&unix.MSG_CTRUNC != 0 || len(files) > limit {
		for _, f := range files {
			_ = f.Close()
		}
		return n, nil, fmt.Errorf("more than %d files", limit)
	}
	return n, files, nil
}
