package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestAnnotationsAreDocumented compares the annotations that are known with the table
// of docs/configuration.md.
func TestAnnotationsAreDocumented(t *testing.T) {
	text := must.Read(t, "../../docs/configuration.md")
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `sluice.dev/([a-z-]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, m[1])
	}
	known := slices.Sorted(slices.Values(service.Annotations))
	slices.Sort(documented)
	if !slices.Equal(known, documented) {
		t.Errorf("known %q, documented %q", known, documented)
	}
}

// TestManifestsAnnotationsAreChecked: the program checks values where files are read.
func TestManifestsAnnotationsAreChecked(t *testing.T) {
	for annotation, want := range map[string]string{
		"balancer: ramdom":       `balancer "ramdom": unknown`,
		"udp-timeout: '30'":      "is not a duration",
		"udp-responses: some":    "is not a number",
		"udp-response: '1'":      "did you mean sluice.dev/udp-responses?",
		"sctp-streams: '1025'":   "is not a number from 1 to 1024",
		"drain: never":           `drain: "never" is not a duration such as 30s, of 1s to 24h0m0s`,
		"drain: 30s":             "",
		"max-connections: '0'":   "is not a number from 1 to 1000000",
		"slow-start: soon":       `slow-start: "soon" is not a duration such as 30s, of 1s to 1h0m0s`,
		"queue-timeout: 1h":      `queue-timeout: "1h" is not a duration such as 30s, of 1ms to 10m0s`,
		"rebalance: 1ms":         "is not a duration such as 30s, of 1s to 1h0m0s",
		"rebalance: 30s":         "",
		"sctp-streams: '17'":     "",
		"datapath: relya":        `"relya" is not one of auto, kernel, relay`,
		"topology-keys: 'a b!'":  "no node label can have the key",
		"datapath: relay":        "",
		"balancer: random":       "",
		"udp-timeout: 30s":       "",
		"udp-responses: '1'":     "",
		"topology-keys: 'a/b,*'": "",
	} {
		dir := t.TempDir()
		manifest := "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    sluice.dev/" + annotation + "\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
		must.OK(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(manifest), 0o600))
		_, warnings, err := runCommand("", "explain", "--manifests", dir, "--from", "192.0.2.1", "--to", "10.96.0.1:80")
		if err != nil || (want == "") != (warnings == "") || !strings.Contains(warnings, want) || want != "" && !strings.Contains(warnings, "a.yaml:6: Service default/web: ") {
			t.Errorf("%s: %v, %s, want %q", annotation, err, warnings, want)
		}
	}
}
