package kubeproxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// ipvsInterface holds the Services' addresses in kube-proxy's IPVS mode: they are the
// node's own while it is there, so that no proxy can take their packets.
const ipvsInterface = "kube-ipvs0"

// removeIPVS removes the interface of kube-proxy's IPVS mode, and gives the addresses
// that it had. It stays while IPVS has virtual servers for them.
func removeIPVS(netNS int) (removed []string, addresses []netip.Addr, err error) {
	nl, err := kernel.Open(netNS, syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, nil, fmt.Errorf("interface %s: %w", ipvsInterface, err)
	}
	defer nl.Close()
	link, err := nl.LinkByName(ipvsInterface)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil, nil
	}
	var found []netlink.Addr
	if err == nil {
		found, err = nl.AddrList(link, netlink.FAMILY_ALL)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("interface %s: %w", ipvsInterface, err)
	}
	for _, f := range found {
		if a, ok := netip.AddrFromSlice(f.IP); ok {
			addresses = append(addresses, a.Unmap())
		}
	}
	var table []byte
	read := func() error {
		table, err = os.ReadFile("/proc/thread-self/net/ip_vs")
		return nil // no such file: no IPVS
	}
	if netNS == 0 {
		_ = read()
	} else if err := sys.InNetNS(netNS, read); err != nil {
		return nil, nil, err
	}
	if n := virtualServers(string(table), addresses); n > 0 {
		return nil, nil, fmt.Errorf("IPVS has %d virtual servers for addresses of the interface %s, which stays with them: run kube-proxy --cleanup from kube-proxy's image, or ipvsadm --clear, which removes those of other programs too", n, ipvsInterface)
	}
	if err := nl.LinkDel(link); err != nil {
		return nil, nil, fmt.Errorf("interface %s: %w", ipvsInterface, err)
	}
	return []string{"interface " + ipvsInterface}, addresses, nil
}

// virtualServers counts those of /proc/net/ip_vs that have one of the addresses. Their
// lines are such as "TCP  0A600001:01BB rr" and "UDP  [fd00:0096:…]:0035 rr".
func virtualServers(table string, addresses []netip.Addr) (n int) {
	for line := range strings.Lines(table) {
		words := strings.Fields(line)
		if len(words) < 2 || !slices.Contains([]string{"TCP", "UDP", "SCTP"}, words[0]) {
			continue
		}
		text := words[1][:max(strings.LastIndexByte(words[1], ':'), 0)]
		a, err := netip.ParseAddr(strings.Trim(text, "[]"))
		if number, notHex := strconv.ParseUint(text, 16, 32); notHex == nil {
			a, err = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(number)))), nil //nolint:gosec // 32 bits
		}
		if err == nil && slices.Contains(addresses, a) {
			n++
		}
	}
	return n
}
