package sys

import "golang.org/x/sys/unix"

// FileLimit returns the soft and hard limit of this process's open descriptors.
func FileLimit() (now, most uint64, err error) { return limit(unix.RLIMIT_NOFILE) }

func limit(resource int) (now, most uint64, err error) {
	var l unix.Rlimit
	err = unix.Getrlimit(resource, &l)
	return l.Cur, l.Max, err
}

// RaiseFileLimit raises the soft limit to the hard limit and returns it. Go does so
// at start-up too, but hides that from programs that read the limit.
func RaiseFileLimit() (uint64, error) {
	now, most, err := FileLimit()
	if err == nil && now < most {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: most})
	}
	return most, err
}

// LockedMemoryLimit returns the soft and hard limit of locked memory in bytes.
// Before Linux 5.11, it bounds BPF maps.
func LockedMemoryLimit() (now, most uint64, err error) { return limit(unix.RLIMIT_MEMLOCK) }

// LiftLockedMemoryLimit removes that limit. It needs CAP_SYS_RESOURCE to exceed the
// hard limit.
func LiftLockedMemoryLimit() error {
	return unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
}
