package netns

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Link returns an interface of a host.
func (h *Host) Link(t testing.TB, name string) netlink.Link {
	t.Helper()
	l, err := h.Netlink().LinkByName(name)
	must.OK(t, err)
	return l
}

// NFT applies a script of nftables in a host's namespace.
func (h *Host) NFT(t testing.TB, script string) {
	t.Helper()
	nft, err := exec.LookPath("nft")
	if err != nil {
		nft = "/usr/sbin/nft"
	}
	command := h.Command(t, nft, "-f", "-")
	command.Stdin = strings.NewReader(script)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, script)
	}
}
