//go:build cluster

package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// The defaults that we write are those that kube-proxy writes, but for the periods
// of the modes that are not the default: it leaves them out.
func TestDefaultConfigIsKubeProxys(t *testing.T) {
	written := func(command ...string) map[string]any {
		t.Helper()
		path := filepath.Join(t.TempDir(), "config.yaml")
		if out, err := exec.Command(command[0], append(command[1:], "--write-config-to", path)...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var config map[string]any
		if err := yaml.Unmarshal(text, &config); err != nil {
			t.Fatal(err)
		}
		for mode, fields := range map[string][]string{"ipvs": {"syncPeriod"}, "nftables": {"syncPeriod", "minSyncPeriod"}} {
			for _, f := range fields {
				delete(config[mode].(map[string]any), f)
			}
		}
		return config
	}
	if d := cmp.Diff(written(program(t, "kube-proxy")), written(os.Getenv("SLUICE_BIN"), "run")); d != "" {
		t.Errorf("the default configuration (-kube-proxy +sluice):\n%s", d)
	}
}
