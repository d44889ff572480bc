package sys

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Capability is a right of a process, by its number in linux/capability.h.
type Capability int

// Capabilities that data paths need.
const (
	NetAdmin Capability = unix.CAP_NET_ADMIN
	NetRaw   Capability = unix.CAP_NET_RAW
	BPF      Capability = unix.CAP_BPF
	Perfmon  Capability = unix.CAP_PERFMON
)

// String returns the name that capabilities(7) has.
func (c Capability) String() string {
	switch c {
	case NetAdmin:
		return "CAP_NET_ADMIN"
	case NetRaw:
		return "CAP_NET_RAW"
	case BPF:
		return "CAP_BPF"
	case Perfmon:
		return "CAP_PERFMON"
	}
	return fmt.Sprintf("capability %d", int(c))
}

// Missing returns the first of some capabilities that the calling thread does not have, or
// false. CAP_SYS_ADMIN has CAP_BPF and CAP_PERFMON in it, which Linux 5.8 has split off.
func Missing(needed ...Capability) (Capability, bool) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&header, &data[0]) != nil {
		return 0, false
	}
	has := func(c Capability) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	for _, c := range needed {
		if !has(c) && ((c != BPF && c != Perfmon) || !has(unix.CAP_SYS_ADMIN)) {
			return c, true
		}
	}
	return 0, false
}
