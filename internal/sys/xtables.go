package sys

import (
	"encoding/binary"
	"fmt"
	"slices"
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
	xtGetEntries   = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES
	xtTableNameLen = 32 // XT_TABLE_MAXNAMELEN
)

// OpenXTables opens the IPv6 or IPv4 tables of the calling thread's network
// namespace.
func OpenXTables(v6 bool) (*XTables, error) {
	level := unix.SOL_IP
	if v6 {
		level = unix.SOL_IPV6
	}
	fd, e := socket(familyOf(v6), unix.SOCK_DGRAM, 0)
	if e != 0 {
		return nil, fmt.Errorf("socket: %w", e)
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
	if e := getOption(x.fd, x.level, xtGetInfo, &answer); e != 0 {
		return XTablesInfo{}, e
	}
	return answer.info, nil
}

// Chains returns the names of a table's chains that are not built in. The error is
// ENOENT if there is no such table, and EPERM without CAP_NET_ADMIN.
func (x *XTables) Chains(table string) (chains []string, err error) {
	entries, err := x.entries(table)
	for _, e := range entries {
		if name := e.begins(); name != "" {
			chains = append(chains, name)
		}
	}
	return chains, err
}

// XTablesRule is a rule of a table.
type XTablesRule struct {
	Chain string // "" for those that are built in
	entry xtEntry
}

// Matches reports whether the rule has an extension that matches packets and whose name
// is wanted.
func (r *XTablesRule) Matches(wanted func(name string) bool) bool {
	return slices.ContainsFunc(r.entry.matches(), wanted)
}

// Rules returns the rules of a table. The errors are those of Chains.
func (x *XTables) Rules(table string) (rules []XTablesRule, err error) {
	entries, err := x.entries(table)
	chain := ""
	for _, e := range entries {
		if name := e.begins(); name != "" {
			chain = name
			continue
		}
		rules = append(rules, XTablesRule{chain, e})
	}
	return rules, err
}

// XTablesTarget is what a rule does with packets: ACCEPT, DROP, QUEUE, RETURN, the name of an
// extension, or of the chain that the rule jumps to. Name is "" for a rule without a target.
type XTablesTarget struct {
	Name    string
	IsChain bool
}

// Targets returns the targets of the rules of a built-in chain, and last the chain's policy.
// hook is a NF_INET_ of linux/netfilter.h. The errors are those of Chains.
func (x *XTables) Targets(table string, hook int) ([]XTablesTarget, error) {
	info, err := x.Info(table)
	if err != nil || info.ValidHooks&(1<<hook) == 0 {
		return nil, err
	}
	entries, err := x.entries(table)
	return targetsOf(entries, info.HookEntry[hook], info.Underflow[hook]), err
}

// targetsOf returns the targets of the entries from one offset to another.
func targetsOf(entries []xtEntry, first, last uint32) (targets []XTablesTarget) {
	chains, at := make(map[uint32]string), uint32(0) // by the offset of their first rule
	for _, e := range entries {
		at += uint32(len(e.b))
		if name := e.begins(); name != "" {
			chains[at] = name
		}
	}
	at = 0
	for _, e := range entries {
		if at >= first && at <= last {
			targets = append(targets, e.does(chains))
		}
		at += uint32(len(e.b))
	}
	return targets
}

// entries reads a table.
func (x *XTables) entries(table string) ([]xtEntry, error) {
	// The table may grow between the two calls, which is EAGAIN.
	for attempt := 0; ; attempt++ {
		info, err := x.Info(table)
		if err != nil {
			return nil, err
		}
		const header = xtTableNameLen + 8 // struct ipt_get_entries: name, size, padding
		answer := make([]byte, header+info.Size)
		copy(answer[:xtTableNameLen-1], table)
		binary.NativeEndian.PutUint32(answer[xtTableNameLen:], info.Size)
		size := uint32(len(answer))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(x.fd), uintptr(x.level), xtGetEntries,
			uintptr(unsafe.Pointer(&answer[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == unix.EAGAIN && attempt < 10:
			continue
		case errno != 0:
			return nil, errno
		}
		return xtEntries(answer[header:], x.level == unix.SOL_IPV6), nil
	}
}

// xtEntry is a struct ipt_entry or ip6t_entry with what follows it.
type xtEntry struct {
	b      []byte
	first  int // where the matches begin
	target int // where they end
}

// xtEntries finds the entries of a table.
func xtEntries(b []byte, v6 bool) (entries []xtEntry) {
	offsets, first := 88, 112 // target_offset and next_offset of struct ipt_entry, and its size
	if v6 {
		offsets, first = 140, 168
	}
	for len(b) >= first {
		target := int(binary.NativeEndian.Uint16(b[offsets:]))
		next := int(binary.NativeEndian.Uint16(b[offsets+2:]))
		if next < first || next > len(b) || target < first || target > next {
			break
		}
		entries = append(entries, xtEntry{b[:next], first, target})
		b = b[next:]
	}
	return entries
}

// begins returns the name of the chain that an entry begins, or "": its target is ERROR,
// with the chain's name. The last entry, which ends the table, is called ERROR itself.
func (e *xtEntry) begins() string {
	const targetHeader, nameLen = 32, 30 // struct xt_entry_target, XT_FUNCTION_MAXNAMELEN
	target := e.b[e.target:]
	if len(target) < targetHeader+nameLen || unix.ByteSliceToString(target[2:31]) != "ERROR" {
		return ""
	}
	if name := unix.ByteSliceToString(target[targetHeader : targetHeader+nameLen]); name != "ERROR" {
		return name
	}
	return ""
}

// does returns an entry's target. chains are by the offset of their first rule.
func (e *xtEntry) does(chains map[uint32]string) XTablesTarget {
	const targetHeader = 32
	target := e.b[e.target:]
	if len(target) < targetHeader+4 {
		return XTablesTarget{}
	}
	if name := unix.ByteSliceToString(target[2:31]); name != "" {
		return XTablesTarget{Name: name}
	}
	verdict := int32(binary.NativeEndian.Uint32(target[targetHeader:]))
	if chain := chains[uint32(verdict)]; chain != "" {
		return XTablesTarget{chain, true}
	}
	return XTablesTarget{Name: map[int32]string{-1: "DROP", -2: "ACCEPT", -4: "QUEUE", -5: "RETURN"}[verdict]}
}

// matches returns the names of an entry's extensions.
func (e *xtEntry) matches() (names []string) {
	const header = 32 // struct xt_entry_match: size, name, revision
	for b := e.b[e.first:e.target]; len(b) >= header; {
		size := int(binary.NativeEndian.Uint16(b))
		if size < header || size > len(b) {
			break
		}
		names = append(names, unix.ByteSliceToString(b[2:31]))
		b = b[size:]
	}
	return names
}

// Close closes the socket.
func (x *XTables) Close() error { return unix.Close(x.fd) }
