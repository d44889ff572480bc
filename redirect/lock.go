package redirect

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Lock says that this process is the one that steers in its network namespace.
// The kernel lets go of it when the process ends, however it ends.
type Lock struct {
	// Squatters hold sockets with names of locks, but have no right to steer. They
	// are ignored.
	Squatters []Holder
	listener  *net.UnixListener
}

// Holder is the process that has a socket with the name of a lock.
type Holder struct {
	PID int // 0 when it cannot be seen from here
	UID uint32
}

// String names the process and its user.
func (h Holder) String() string {
	if h.PID == 0 {
		return fmt.Sprintf("a process of uid %d that cannot be seen from here", h.UID)
	}
	return fmt.Sprintf("process %d of uid %d", h.PID, h.UID)
}

// LockedError says that another process steers in this network namespace.
type LockedError struct {
	Name string
	Holder
}

// Error names the process that has the lock.
func (e *LockedError) Error() string {
	return fmt.Sprintf("%s steers %q in this network namespace", e.Holder, e.Name)
}

// AcquireLock takes the lock of the network namespace that the process is in.
// The name is that of the nftables table, so that proxies that share nothing
// in the kernel do not exclude each other. When another process has the lock,
// the error is a *LockedError.
//
// The lock is an abstract unix socket. Its name belongs to the network namespace,
// whatever the file systems are, and vanishes with its process. Every process may
// take such a name, so that a socket counts only if its holder has CAP_NET_ADMIN
// here or, where the holder cannot be seen, is root or our own user. If another
// process has the name, the proxy takes a name that begins with it. Two proxies that
// start at the same moment may both fail.
func AcquireLock(name string) (*Lock, error) {
	base := "@sluice/" + name
	own := base
	l, err := listen(own)
	if errors.Is(err, syscall.EADDRINUSE) {
		own = base + "/" + rand.Text()
		l, err = listen(own)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %q: %w", name, err)
	}
	lock := &Lock{listener: l}
	for _, other := range namesLike(base) {
		if other == own {
			continue
		}
		holder, listens := holderOf(other)
		if listens && holder.maySteer() {
			_ = l.Close() // the error to tell is another
			return nil, &LockedError{Name: name, Holder: holder}
		}
		lock.Squatters = append(lock.Squatters, holder)
	}
	go turnAway(l)
	return lock, nil
}

func listen(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name})
}

// namesLike returns the abstract names in this network namespace that are a name or
// begin with it and a slash. Where there is no /proc, only the very name is tried.
func namesLike(base string) []string {
	f, err := os.Open("/proc/thread-self/net/unix")
	if err != nil {
		return []string{base}
	}
	defer f.Close()
	var names []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Text()
		i := strings.Index(line, " "+base)
		if i < 0 {
			continue
		}
		if name := line[i+1:]; name == base || strings.HasPrefix(name, base+"/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// holderOf returns the process that listens at a name. A process that does not answer
// at once is no proxy.
func holderOf(name string) (h Holder, listens bool) {
	cred, err := sys.ListenerCredentials(name)
	if err != nil {
		return Holder{}, false
	}
	return Holder{PID: int(cred.Pid), UID: cred.Uid}, true
}

// maySteer reports whether the process has the right to steer. A process in another
// container cannot be seen from here; then its user decides.
func (h Holder) maySteer() bool {
	if h.PID != 0 {
		if is, err := sys.IsNetAdmin(h.PID, h.UID); err == nil {
			return is
		}
	}
	return h.UID == 0 || h.UID == uint32(os.Geteuid())
}

// Descriptor returns the lock for the process that takes over. The caller closes it.
func (l *Lock) Descriptor() (fd int, err error) { return sys.Duplicate(l.listener) }

// InheritLock takes the Descriptor of another process's lock. The lock is that process's
// until Own.
func InheritLock(fd int) (*Lock, error) {
	f := os.NewFile(uintptr(fd), "lock")
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	own, is := l.(*net.UnixListener)
	if !is {
		_ = l.Close()
		return nil, errors.New("lock: not a unix socket")
	}
	go turnAway(own)
	return &Lock{listener: own}, nil
}

// Own makes this process the holder that others see. It undoes what another process's Own has
// done, if that process could not take over.
func (l *Lock) Own() error {
	raw, err := l.listener.SyscallConn()
	if err != nil {
		return err
	}
	var errno sys.Errno
	err = raw.Control(func(fd uintptr) { errno = sys.ListenAgain(int(fd), 0) })
	if err == nil && errno != 0 {
		err = errno
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	return nil
}

// IsLocked reports whether a process steers in this network namespace under a name.
func IsLocked(name string) bool {
	for _, other := range namesLike("@sluice/" + name) {
		if holder, listens := holderOf(other); listens && holder.maySteer() {
			return true
		}
	}
	return false
}

// SteersHere reports whether a process that can be seen from here steers in this network namespace,
// under any name. Processes of other containers cannot be seen.
func SteersHere() bool {
	for _, name := range namesLike("@sluice") {
		if holder, listens := holderOf(name); listens && holder.PID != 0 && holder.maySteer() {
			return true
		}
	}
	return false
}

// Release lets go of the lock.
func (l *Lock) Release() error { return l.listener.Close() }

// turnAway accepts the connections of processes that ask who holds the lock, so that
// they do not fill the queue.
func turnAway(l *net.UnixListener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}
