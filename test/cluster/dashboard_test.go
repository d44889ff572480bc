//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/must"
)

// dashboard is the one for Grafana.
const dashboard = deploy + "/grafana/sluice.json"

// TestDashboard has Prometheus check each query of the dashboard, as a rule.
func TestDashboard(t *testing.T) {
	text := must.Read(t, dashboard)
	var root any
	must.OK(t, json.Unmarshal(text, &root))
	variables := strings.NewReplacer("$__rate_interval", "1m", "$namespace", ".*", "$service", ".*")
	var rules []map[string]string
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if expr, is := v["expr"].(string); is {
				rules = append(rules, map[string]string{"record": fmt.Sprintf("sluice:panel%d", len(rules)), "expr": variables.Replace(expr)})
			}
			for _, inner := range v {
				walk(inner)
			}
		case []any:
			for _, inner := range v {
				walk(inner)
			}
		}
	}
	walk(root)
	if len(rules) < 20 {
		t.Fatalf("only %d queries", len(rules))
	}
	file := must.Get(yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}}))(t)
	path := filepath.Join(t.TempDir(), "rules.yaml")
	must.OK(t, os.WriteFile(path, file, 0o600))
	if out, err := exec.Command("promtool", "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
