package e2e

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestCleanupGoesOnAfterAFailure: where the programs that kube-proxy's chains of
// iptables-legacy need are missing, as in the image, cleanup --kube-proxy fails, and
// removes our own state all the same.
func TestCleanupGoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("iptables-legacy-restore"); err != nil {
		t.Skip("SKIP-NEEDS: iptables-legacy-restore")
	}
	lab := netns.NewLab(t, 1)
	p := startProxy(t, lab, []webService{webOn(lab)})
	p.kill()
	restore := lab.Node.Command(t, "iptables-legacy-restore")
	restore.Stdin = strings.NewReader("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
	must.Run(t, restore)
	const image = `for dir in /usr/sbin /usr/bin; do mount -t tmpfs none $dir || exit 2; done; exec "$@"`
	out, err := lab.Node.Command(t, "unshare", "-m", "--propagation", "private", "sh", "-c", image, "sh",
		built(t), "cleanup", "--kube-proxy", "--bpf-root", bpfRoot()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "there is no program iptables-legacy-restore here") || !strings.Contains(string(out), "removed ") {
		t.Errorf("cleanup --kube-proxy: %v\n%s", err, out)
	}
	says(t, lab, "nothing to remove", "cleanup")
}

// TestCleanupNamesWhatItLeaves: a chain of kube-proxy that another program uses stays,
// which is not "nothing to remove": sluice doctor goes on to count it.
func TestCleanupNamesWhatItLeaves(t *testing.T) {
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip("SKIP-NEEDS: iptables-nft-restore")
	}
	lab := netns.NewLab(t, 1)
	restore := lab.Node.Command(t, "iptables-nft-restore")
	restore.Stdin = strings.NewReader("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:THEIRS - [0:0]\n-A OUTPUT -j THEIRS\n-A THEIRS -j KUBE-MARK-MASQ\nCOMMIT\n")
	must.Run(t, restore)
	const left = "left iptables (nft) nat chain KUBE-MARK-MASQ: another program's chain leads to it"
	for _, removed := range []bool{true, false} {
		out, err := sluice(t, lab, "cleanup", "--kube-proxy")
		if err != nil || !strings.Contains(out, left) || strings.Contains(out, "nothing to remove") || strings.Contains(out, "removed iptables (nft) nat chain KUBE-SERVICES") != removed {
			t.Errorf("%v\n%s", err, out)
		}
	}
}
