package demo

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/scratch"
)

// untouched returns an error if a namespace has any interface but lo: then it was not
// made for the demo.
func untouched(n *scratch.Namespace) error {
	links, err := n.LinkList()
	if err != nil {
		return fmt.Errorf("interfaces of %s: %w", n, err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; name != "lo" && l.Attrs().Flags&net.FlagUp != 0 {
			return fmt.Errorf("the network namespace of %s is in use: it has the interface %s", n, name)
		}
	}
	return nil
}

// withoutDAD switches duplicate address detection off for new interfaces: it takes
// seconds and finds nothing on a veth pair. Where it cannot be switched off (/proc
// is read-only in some containers), settled waits for its end.
func withoutDAD(n *scratch.Namespace) {
	_ = n.Do(func() error {
		var all error
		for _, of := range []string{"all", "default"} {
			all = errors.Join(all, os.WriteFile("/proc/sys/net/ipv6/conf/"+of+"/accept_dad", []byte("0"), 0))
		}
		return all
	})
}

// settled reports whether each IPv6 address of a namespace can be used: duplicate
// address detection is finished.
func settled(n *scratch.Namespace) (bool, error) {
	addrs, err := n.AddrList(nil, netlink.FAMILY_V6)
	if err != nil {
		return false, fmt.Errorf("addresses: %w", err)
	}
	return !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.Flags&syscall.IFA_F_TENTATIVE != 0 }), nil
}
