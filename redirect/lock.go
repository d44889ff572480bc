package redirect

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Lock says that this process is the one that steers in its network namespace.
// The kernel lets go of it when the process ends, however it ends.
type Lock struct {
	listener *net.UnixListener
}

// LockedError says that another process steers in this network namespace.
type LockedError struct {
	Name string
	PID  int // 0 when it cannot be seen from here
}

// Error names the process that has the lock.
func (e *LockedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("another process steers %q in this network namespace", e.Name)
	}
	return fmt.Sprintf("process %d steers %q in this network namespace", e.PID, e.Name)
}

// AcquireLock takes the lock of the network namespace that the process is in.
// The name is that of the nftables table, so that proxies that share nothing
// in the kernel do not exclude each other. When another process has the lock,
// the error is a *LockedError.
//
// The lock is an abstract unix socket: its names are those of one network
// namespace, which is what must not be shared, and no file stays behind.
func AcquireLock(name string) (*Lock, error) {
	addr := &net.UnixAddr{Net: "unix", Name: "@sluice/" + name}
	l, err := net.ListenUnix("unix", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, &LockedError{Name: name, PID: holder(addr)}
	}
	if err != nil {
		return nil, fmt.Errorf("lock %q: %w", name, err)
	}
	go turnAway(l)
	return &Lock{listener: l}, nil
}

// Release lets go of the lock.
func (l *Lock) Release() error { return l.listener.Close() }

// turnAway answers those who connect to learn who holds the lock, so that they
// do not fill the queue.
func turnAway(l *net.UnixListener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}

// holder gives the process that listens at addr, or 0.
func holder(addr *net.UnixAddr) int {
	c, err := net.DialUnix("unix", nil, addr)
	if err != nil {
		return 0
	}
	defer c.Close()
	pid, err := sys.PeerPID(c)
	if err != nil {
		return 0
	}
	return pid
}
