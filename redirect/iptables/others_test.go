package iptables

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
)

// TestLegacyChainsAreNamedWithoutPrograms: an image without iptables programs cannot
// remove chains of iptables-legacy, and must not say that there are none.
func TestLegacyChainsAreNamedWithoutPrograms(t *testing.T) {
	node := netns.NewLab(t, 1).Node
	for _, program := range []string{"iptables-legacy-restore", "ip6tables-legacy-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("SKIP-NEEDS: %s", program)
		}
		cmd := node.Command(t, program)
		cmd.Stdin = strings.NewReader("*nat\n:KUBE-SERVICES - [0:0]\n:THEIRS - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n*filter\n:KUBE-FORWARD - [0:0]\nCOMMIT\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	theirs := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
	path, dirs := "/nowhere", rootDirs
	t.Setenv("PATH", path)
	rootDirs = nil
	defer func() { rootDirs = dirs }()
	removed, _, left, err := RemoveLegacyChains(node.FD(), theirs)
	slices.Sort(left)
	if want := []string{"KUBE-FORWARD", "KUBE-FORWARD", "KUBE-SERVICES", "KUBE-SERVICES"}; err != nil || len(removed) > 0 || !slices.Equal(left, want) {
		t.Errorf("without programs: removed %q, left %q, %v; want left %q", removed, left, err, want)
	}
	rootDirs = dirs
	removed, _, left, err = RemoveLegacyChains(node.FD(), theirs)
	if err != nil || len(removed) != 4 || len(left) > 0 {
		t.Errorf("with programs: removed %q, left %q, %v", removed, left, err)
	}
}
