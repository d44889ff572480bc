package sys

import "golang.org/x/sys/unix"

// FileLimit returns how many descriptors this process may have open, now and
// at most.
func FileLimit() (now, most uint64, err error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, 0, err
	}
	return l.Cur, l.Max, nil
}

// RaiseFileLimit raises the limit to the most that the process may have, and
// returns it. Go does that by itself at start-up, but keeps it from the limit's
// readers.
func RaiseFileLimit() (uint64, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, err
	}
	if l.Cur < l.Max {
		l.Cur = l.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
			return l.Cur, err
		}
	}
	return l.Cur, nil
}

// LockedMemoryLimit returns how many bytes of memory this process may lock,
// now and at most; before Linux 5.11 that bounds its BPF maps.
func LockedMemoryLimit() (now, most uint64, err error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return 0, 0, err
	}
	return l.Cur, l.Max, nil
}

// LiftLockedMemoryLimit takes that limit away. It needs CAP_SYS_RESOURCE where
// the limit may not be as high.
func LiftLockedMemoryLimit() error {
	return unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
}
