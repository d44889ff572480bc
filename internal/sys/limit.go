package sys

import "golang.org/x/sys/unix"

// FileLimit returns the soft and hard limit of this process's open descriptors.
func FileLimit() (now, most uint64, err error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, 0, err
	}
	return l.Cur, l.Max, nil
}

// RaiseFileLimit raises the soft limit to the hard limit and returns it. Go does so
// at start-up too, but hides that from programs that read the limit.
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

// LockedMemoryLimit returns the soft and hard limit of locked memory in bytes.
// Before Linux 5.11, it bounds BPF maps.
func LockedMemoryLimit() (now, most uint64, err error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return 0, 0, err
	}
	return l.Cur, l.Max, nil
}

// LiftLockedMemoryLimit removes that limit. It needs CAP_SYS_RESOURCE to exceed the
// hard limit.
func LiftLockedMemoryLimit() error {
	return unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
}
