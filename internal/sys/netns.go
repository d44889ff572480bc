package sys

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// InNetNS runs f in the network namespace that fd is open on, on a thread that
// runs nothing else meanwhile, and gives its error. Sockets that f makes belong
// to that namespace for ever; goroutines that f starts are outside of it. With
// fd 0 f runs where the process is.
func InNetNS(fd int, f func() error) error {
	if fd == 0 {
		return f()
	}
	return onOwnThread(func() error {
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
		return f()
	})
}

// NewNetNS makes a network namespace with nothing in it but a lo that is down.
// It lasts until the file is closed and no socket is left in it. It needs
// CAP_SYS_ADMIN.
func NewNetNS() (*os.File, error) {
	var f *os.File
	err := onOwnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		f, err = OwnNetNS()
		return err
	})
	return f, err
}

// OwnNetNS opens the network namespace that the calling thread is in.
func OwnNetNS() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }

// onOwnThread runs f on a thread that is locked to a goroutine of its own and
// takes the thread back to the namespace that it came from. A thread that
// cannot be taken back stays locked, so that the runtime ends it together with
// its goroutine instead of running others on it.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		err := errors.New("the function ended its goroutine")
		defer func() { done <- err }()
		runtime.LockOSThread()
		home, homeErr := OwnNetNS()
		if homeErr != nil {
			err = fmt.Errorf("own network namespace: %w", homeErr)
			return
		}
		defer home.Close()
		defer func() {
			if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = f()
	}()
	return <-done
}
