// Package kernel has what the modes of steering need to speak with the kernel: handles of
// netlink in a network namespace, a walk over attributes, and readers of nftables and of
// the tables of iptables-legacy.
package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Loopback is the index of the interface lo in every network namespace.
const Loopback = 1

// Open returns a netlink handle of a protocol, such as NETLINK_ROUTE, in a network
// namespace: a descriptor, or 0 for the one that it is called in.
func Open(namespace, protocol int) (nl *netlink.Handle, err error) {
	if namespace != 0 {
		nl, err = netlink.NewHandleAt(netns.NsHandle(namespace), protocol)
	} else {
		nl, err = netlink.NewHandle(protocol)
	}
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return nl, nil
}

// Uninterrupted asks for a list again if a change came between its parts, so that some may be
// missing.
func Uninterrupted[T any](ask func() (T, error)) (list T, err error) {
	for range 10 {
		if list, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

// Attributes returns the netlink attributes in b, by type and value. It stops at
// one whose length is wrong.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	const header, typeMask = 4, 0x3fff // NLA_TYPE_MASK
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= header {
			n := int(binary.NativeEndian.Uint16(b))
			if n < header || n > len(b) || !yield(binary.NativeEndian.Uint16(b[2:])&typeMask, b[header:n]) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// Attribute returns the value of the first attribute of a type, or nil.
func Attribute(b []byte, kind uint16) []byte {
	for k, value := range Attributes(b) {
		if k == kind {
			return value
		}
	}
	return nil
}
