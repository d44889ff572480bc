package sys

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// XTables reads the tables of ip_tables or ip6_tables (iptables-legacy) of one
// network namespace. Its methods except Close are safe for concurrent use.
type XTables struct {
	fd    int
	level int
}

// XTablesInfo is the size and the entry points of a table: struct ipt_getinfo of
// linux/netfilter_ipv4/ip_tables.h without the name. It changes whenever the number
// of rules in any chain changes.
type XTablesInfo struct {
	ValidHooks uint32
	HookEntry  [5]uint32
	Underflow  [5]uint32
	Entries    uint32
	Size       uint32
}

const (
	xtGetInfo      = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	xtTableNameLen = 32 // XT_TABLE_MAXNAMELEN
)

// OpenXTables opens the IPv6 or IPv4 tables of the calling thread's network
// namespace.
func OpenXTables(v6 bool) (*XTables, error) {
	family, level := unix.AF_INET, unix.SOL_IP
	if v6 {
		family, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return &XTables{fd: fd, level: level}, nil
}

// Info returns information about a table. The error is ENOENT if there is none, and
// EPERM without CAP_NET_ADMIN.
func (x *XTables) Info(table string) (XTablesInfo, error) {
	var answer struct {
		name [xtTableNameLen]byte
		info XTablesInfo
	}
	copy(answer.name[:xtTableNameLen-1], table)
	size := uint32(unsafe.Sizeof(answer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(x.fd), uintptr(x.level), xtGetInfo,
		uintptr(unsafe.Pointer(&answer)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return XTablesInfo{}, errno
	}
	return answer.info, nil
}

// Close closes the socket.
func (x *XTables) Close() error { return unix.Close(x.fd) }
