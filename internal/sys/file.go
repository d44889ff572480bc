package sys

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// OpenRead opens a file for reading and never waits: a pipe without a writer,
// which os.Open would wait for, is opened too.
func OpenRead(name string) (*os.File, error) {
	return os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// OpenAppend opens a file for appending, makes it if there is none, and never
// waits. A FIFO that nobody reads is opened for reading too: it keeps what is
// written until a reader comes.
func OpenAppend(name string, mode fs.FileMode) (*os.File, error) {
	const flags = os.O_APPEND | os.O_CREATE | unix.O_NONBLOCK | unix.O_NOCTTY
	f, err := os.OpenFile(name, flags|os.O_WRONLY, mode)
	if errors.Is(err, unix.ENXIO) {
		return os.OpenFile(name, flags|os.O_RDWR, mode)
	}
	return f, err
}
