package netns

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Link returns an interface of a host.
func (h *Host) Link(t testing.TB, name string) netlink.Link {
	t.Helper()
	return must.Get(h.Netlink().LinkByName(name))(t)
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

// Proc returns what a file of /proc/thread-self says in a host's namespace.
func (h *Host) Proc(t testing.TB, file string) string {
	t.Helper()
	var text []byte
	must.OK(t, h.Do(func() (err error) { text, err = os.ReadFile("/proc/thread-self/" + file); return err }))
	return string(text)
}

// Counter returns a counter of a protocol, such as "Ip:", in a file of /proc/net with lines of names and values.
func (h *Host) Counter(t testing.TB, file, protocol, name string) (n int) {
	t.Helper()
	var heads []string
	for line := range strings.Lines(h.Proc(t, "net/"+file)) {
		if fields := strings.Fields(line); fields[0] != protocol {
			continue
		} else if heads == nil {
			heads = fields
		} else if i := slices.Index(heads, name); i > 0 {
			_, _ = fmt.Sscan(fields[i], &n)
		}
	}
	return n
}
