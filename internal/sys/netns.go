package sys

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// InNetNS runs f in the network namespace of fd, on a thread of its own, and
// returns f's error. Sockets that f creates belong to that namespace permanently.
// Goroutines that f starts do not run in it. With fd 0, f runs in the process's
// namespace.
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

// NewNetNS creates a network namespace with only a lo interface, which is down. The
// namespace exists until the file and all sockets in it are closed. It needs
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

// OwnNetNS opens the network namespace of the calling thread.
func OwnNetNS() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }

// onOwnThread runs f on a locked thread of its own and then returns the thread to
// its original namespace. If that fails, the thread stays locked, so that the
// runtime ends it with its goroutine instead of reusing it.
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

// NetNSInode returns the number of a network namespace, which no other one has at the
// same time. With fd 0, it is that of the process's namespace.
func NetNSInode(fd int) (uint64, error) {
	var st unix.Stat_t
	var err error
	if fd == 0 {
		err = unix.Stat("/proc/thread-self/ns/net", &st)
	} else {
		err = unix.Fstat(fd, &st)
	}
	if err != nil {
		return 0, fmt.Errorf("number of the network namespace: %w", err)
	}
	return st.Ino, nil
}

// NetNSCookie returns a number of a network namespace that no other one ever has. With fd 0,
// it is that of the process's namespace. Before Linux 5.14 it is 0.
func NetNSCookie(fd int) (cookie uint64, err error) {
	err = InNetNS(fd, func() error {
		s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			defer func() { _ = unix.Close(s) }()
			cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		}
		if err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
			return fmt.Errorf("cookie of the network namespace: %w", err)
		}
		return nil
	})
	return cookie, err
}
