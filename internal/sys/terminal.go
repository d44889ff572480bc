package sys

import (
	"os"

	"golang.org/x/sys/unix"
)

// Terminal reports whether a file is a terminal, and its number of columns, or 0 if
// unknown.
func Terminal(f *os.File) (columns int, ok bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, false
	}
	var ws *unix.Winsize
	var ioctl error
	err = raw.Control(func(fd uintptr) { ws, ioctl = unix.IoctlGetWinsize(int(fd), unix.TIOCGWINSZ) })
	if err != nil || ioctl != nil {
		return 0, false
	}
	return int(ws.Col), true
}
