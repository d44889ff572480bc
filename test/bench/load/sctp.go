package load

import (
	"fmt"
	"net/netip"
	"os"
)

// dialSCTP opens an association of one-to-one style.
func dialSCTP(target string) (*os.File, error) {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return nil, err
	}
	addr := newSockaddr(to).overSCTP()
	fd, err := connected(addr)
	if err != nil {
		return nil, err
	}
	o := addr.noDelay()
	setOption(fd, o[0], o[1], o[2])
	return os.NewFile(uintptr(fd), "association"), nil
}

// AskSCTP tells whether the server's echo port answers over SCTP at an address.
func AskSCTP(target netip.Addr) error {
	a, err := dialSCTP(netip.AddrPortFrom(target, PortEcho).String())
	if err != nil {
		return err
	}
	err = ping(a)
	if e := a.Close(); err == nil && e != nil {
		err = fmt.Errorf("close: %w", e)
	}
	return err
}
