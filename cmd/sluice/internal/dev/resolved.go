package dev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// resolvedLink is the interface that systemd-resolved knows the DNS server by: it keeps
// servers and domains for each interface but loopback.
const resolvedLink = "sluice-dev"

// resolvedPatience bounds a call of resolvectl.
const resolvedPatience = 5 * time.Second

// Resolved has systemd-resolved ask a DNS server for the names of a zone. All of it lasts
// as long as the process has the interface, so that a killed process leaves nothing.
type Resolved struct {
	files []*os.File
}

// ResolvedRuns reports whether systemd-resolved runs, and the machine's programs ask it.
func ResolvedRuns() bool {
	if !isBeside(resolvedDir + "/io.systemd.Resolve") {
		return false
	}
	if _, err := exec.LookPath("resolvectl"); err != nil {
		return false
	}
	stubs := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.53:53"), netip.MustParseAddrPort("127.0.0.54:53")}
	if slices.ContainsFunc(Resolvers("/etc/resolv.conf"), func(r netip.AddrPort) bool { return slices.Contains(stubs, r) }) {
		return true
	}
	text, err := os.ReadFile("/etc/nsswitch.conf") // without one, nobody asks it
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "hosts:" && slices.Contains(fields, "resolve") {
			return true
		}
	}
	return false
}

// isBeside reports whether the server of a Unix socket is in this process's network
// namespace: numbers of interfaces mean others elsewhere.
func isBeside(socket string) bool {
	c, err := net.DialTimeout("unix", socket, resolvedPatience)
	if err != nil {
		return false
	}
	defer c.Close()
	peer, err := sys.PeerCredentials(c.(*net.UnixConn))
	if err != nil {
		return false
	}
	its, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", peer.Pid))
	own, ownErr := os.Stat("/proc/self/ns/net")
	return err == nil && ownErr == nil && os.SameFile(its, own)
}

// TellResolved makes the interface, gives it an address, without which systemd-resolved does
// not use it, and tells systemd-resolved server and zone. It asks this server for no other
// names.
func TellResolved(ctx context.Context, server, zone string, address netip.Addr) (*Resolved, error) {
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: resolvedLink}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, Queues: 1, NonPersist: true}
	if err := netlink.LinkAdd(tun); err != nil {
		return nil, fmt.Errorf("interface %s: %w", resolvedLink, err)
	}
	r := &Resolved{files: tun.Fds}
	link, err := netlink.LinkByName(resolvedLink)
	if err == nil {
		err = errors.Join(
			netlink.AddrAdd(link, &netlink.Addr{IPNet: netlink.NewIPNet(address.AsSlice())}),
			netlink.LinkSetUp(link),
		)
	}
	for _, args := range [][]string{
		{"dns", resolvedLink, server},
		{"domain", resolvedLink, "~" + zone},
		{"default-route", resolvedLink, "no"},
		{"llmnr", resolvedLink, "no"},
		{"mdns", resolvedLink, "no"},
	} {
		if err == nil {
			err = resolvectl(ctx, args...)
		}
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func resolvectl(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, resolvedPatience)
	defer cancel()
	out, err := exec.CommandContext(ctx, "resolvectl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("resolvectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Close removes the interface, and systemd-resolved forgets what it was told. r may be nil.
func (r *Resolved) Close() {
	if r == nil {
		return
	}
	for _, f := range r.files {
		_ = f.Close()
	}
}
