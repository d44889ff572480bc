package main

import (
	"bytes"
	"flag"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

var update = flag.Bool("update", false, "write the golden files")

// runCommand runs sluice with arguments, and returns what it writes and its error.
func runCommand(stdin string, args ...string) (stdout, stderr string, err error) {
	cmd := newRootCommand()
	var out, errOut bytes.Buffer
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	cmd.SetArgs(args)
	err = cmd.Execute()
	return out.String(), errOut.String(), err
}

const cluster = "testdata/explain"

func explainArgs(args ...string) []string {
	return append([]string{"explain", "--manifests", cluster, "--hostname-override", "node-1"}, args...)
}

// TestExplainText compares what is said to people with golden files.
func TestExplainText(t *testing.T) {
	for name, args := range map[string]string{
		"cluster-ip":      "--from 10.244.1.9 --to 10.96.0.10:80 --cluster-cidr 10.244.0.0/16",                                                                                       // A3.2, A3.9
		"outside-local":   "--from 203.0.113.9 --to 192.0.2.10:80 --detect-local-mode NodeCIDR",                                                                                      // A3.3, A2.5
		"not-in-ranges":   "--from 198.51.100.7 --to 192.0.2.10:80",                                                                                                                  // A3.10
		"node-port":       "--from 198.51.100.7 --to 172.16.0.1:30080",                                                                                                               // A3.3
		"short-circuit":   "--from 10.244.1.9 --to 172.16.0.1:30080 --detect-local-mode NodeCIDR",                                                                                    // A3.6, A4.6
		"pod-interface":   "--from 10.244.1.9 --to 172.16.0.1:30080 --detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix cali --pod-cidr 10.244.1.9/32,10.244.1.1/32", // A3.6, A4.6
		"no-pod-yet":      "--from 10.244.1.9 --to 10.96.0.10:80 --detect-local-mode BridgeInterface --pod-bridge-interface cbr0",                                                    // A3.8, A4.6
		"node-itself":     "--from 172.16.0.1 --to 172.16.0.1:30080",                                                                                                                 // A3.6
		"not-a-node-port": "--from 198.51.100.7 --to 172.16.0.1:30080 --nodeport-addresses 10.0.0.0/8",                                                                               // A4.4
		"no-local":        "--from 10.244.1.9 --to 10.96.0.11:6379",                                                                                                                  // A3.5
		"hints":           "--from 10.244.1.9 --to 10.96.0.12:53 --protocol udp",                                                                                                     // A2.9
		"topology-keys":   "--from 10.244.1.9 --to 10.96.0.13:80",                                                                                                                    // topology keys
		"no-endpoints":    "--from 10.244.1.9 --to 10.96.0.14:80",                                                                                                                    // A3.4
		"unknown-port":    "--from 10.244.1.9 --to 10.96.0.14:81",                                                                                                                    // A3.12
		"unknown-ip":      "--from 10.244.1.9 --to 10.96.0.99:80 --service-cidr 10.96.0.0/16",                                                                                        // A3.12
		"other-proxy":     "--from 10.244.1.9 --to 10.96.0.15:80 --service-cidr 10.96.0.0/16",                                                                                        // A1.1
		"not-ours":        "--from 10.244.1.9 --to 192.0.2.10:22",                                                                                                                    // A3.13
		"hairpin":         "--from 10.244.1.1 --to 10.96.0.10:80 --cluster-cidr 10.244.0.0/16",                                                                                       // A3.8
		"masquerade-all":  "--from 10.244.1.9 --to 10.96.0.10:80 --cluster-cidr 10.244.0.0/16 --masquerade-all",                                                                      // A3.8
	} {
		got, warnings, err := runCommand("", explainArgs(strings.Fields(args)...)...)
		if err != nil || warnings != "" {
			t.Errorf("%s: %v %s", name, err, warnings)
			continue
		}
		compareGolden(t, filepath.Join("testdata", "explain-"+name+".golden"), got)
	}
}

// compareGolden compares a text with a file, or with -update writes the file.
func compareGolden(t *testing.T, golden, got string) {
	t.Helper()
	if *update {
		must.OK(t, os.WriteFile(golden, []byte(got), 0o644))
	}
	want := must.Read(t, golden)
	check.Textf(t, got, string(want), "%s", filepath.Base(golden))
}

// TestExplainJSON wants the form that docs/explain.md describes.
func TestExplainJSON(t *testing.T) {
	const want = `{"verdict":"accept","service":"shop/web:http","address":"LoadBalancer","policy":"Local","candidates":["10.244.1.1:8080"],"source":"client","affinity":"ClientIP",` +
		`"reason":"external traffic policy Local: 1 of 4 endpoints, ready on this node; the endpoint sees the client","rules":["A3.3","A2.5","A3.9"]}` + "\n"
	got, _, err := runCommand("", explainArgs("--from", "203.0.113.9", "--to", "192.0.2.10:80", "-o", "json")...)
	if err != nil || got != want {
		t.Errorf("%v\ngot  %s\nwant %s", err, got, want)
	}
	got, _, err = runCommand(`{"from":"203.0.113.9","to":"192.0.2.10:80"}`, explainArgs("-f", "-")...)
	if err != nil || got != want {
		t.Errorf("-f -: %v\ngot  %s\nwant %s", err, got, want)
	}
	file := filepath.Join(t.TempDir(), "questions")
	must.OK(t, os.WriteFile(file, []byte("x\n"+`{"from":"203.0.113.9","to":"192.0.2.10:80"}`+"\n"), 0o644))
	got, _, err = runCommand("", explainArgs("-f", file)...)
	if err == nil || !strings.HasPrefix(err.Error(), "1 of 2 lines are no questions; the first: line 1: ") || !strings.HasSuffix(got, want) {
		t.Errorf("-f with a bad line: %v\n%s", err, got)
	}
	docs, err := os.ReadFile("../../docs/explain.md")
	if err != nil || !strings.Contains(string(docs), strings.TrimSpace(want)) {
		t.Errorf("docs/explain.md does not show %s (%v)", want, err)
	}
}

// TestExplainServiceProxyName: with a name, Services without the label are
// another's (A1.2).
func TestExplainServiceProxyName(t *testing.T) {
	got, _, err := runCommand("", explainArgs("--from", "203.0.113.9", "--to", "192.0.2.10:80", "--service-proxy-name", "sluice", "-o", "json")...)
	if err != nil || !strings.HasPrefix(got, `{"verdict":"none"`) {
		t.Errorf("A1.2: %v %s", err, got)
	}
}

// TestExplainIsReproducible wants the addresses of this machine to play no
// part: only --node-ip and Node objects say what the node's own are.
func TestExplainIsReproducible(t *testing.T) {
	host := must.Get(net.InterfaceAddrs())(t)
	for _, found := range host {
		a := netip.MustParsePrefix(found.String()).Addr()
		if a.IsLoopback() || !a.Is4() {
			continue
		}
		question := []string{"--from", "198.51.100.7", "--to", a.String() + ":30080", "-o", "json"}
		got, _, err := runCommand("", explainArgs(question...)...)
		if err != nil || !strings.HasPrefix(got, `{"verdict":"none"`) {
			t.Errorf("%s without --node-ip: %v %s", a, err, got)
		}
		got, _, err = runCommand("", explainArgs(append(question, "--node-ip", "10.9.9.9", "--node-ip", a.String())...)...)
		if err != nil || !strings.HasPrefix(got, `{"verdict":"accept"`) {
			t.Errorf("%s with --node-ip: %v %s", a, err, got)
		}
	}
}

func TestExplainErrors(t *testing.T) {
	for args, want := range map[string]string{
		"explain --from 10.0.0.1 --to 10.96.0.10:80":                                                                           "there is nothing to decide by",
		"explain --manifests nowhere --from 10.0.0.1 --to 10.96.0.10:80":                                                       "--manifests: stat nowhere",
		"explain --manifests " + cluster:                                                                                       "which connection?",
		"explain --manifests " + cluster + " --from 10.0.0.1":                                                                  "which connection?",
		"explain --manifests " + cluster + " --from 10.0.0.1 --to web":                                                         `--to: "web" is not an IP address and a port`,
		"explain --manifests " + cluster + " --from 10.0.0.1 --to 10.96.0.10:80 --protocol icmp":                               `"icmp" is not one of tcp, udp, sctp`,
		"explain --manifests " + cluster + " -f - --to 10.96.0.10:80":                                                          "-f and --from, --to, --protocol exclude each other",
		"explain --manifests " + cluster + " -f - -o text":                                                                     "-f answers in JSON only",
		"explain --manifests " + cluster + " -f nowhere":                                                                       "open nowhere",
		"explain --manifests " + cluster + " -f - --nodeport-addresses primary,primary":                                        "primary is given twice",                                // A4.1
		"explain --manifests " + cluster + " -f - --nodeport-addresses eth0":                                                   "the words primary, localhost and all are possible too", // A4.1
		"explain --manifests " + cluster + " -f - --detect-local-mode BridgeInterface":                                         "needs --pod-bridge-interface",                          // A4.6
		"explain --manifests " + cluster + " -f - --detect-local-mode InterfaceNamePrefix":                                     "needs --pod-interface-name-prefix",                     // A4.6
		"explain --manifests " + cluster + " -f - --pod-bridge-interface cbr0":                                                 "counts only with --detect-local-mode BridgeInterface",
		"explain --manifests " + cluster + " -f - --detect-local-mode BridgeInterface --pod-bridge-interface 0123456789abcdef": "longer than the name of an interface",
		"explain --manifests " + cluster + " -f - --pod-cidr 10.0.0.0/8":                                                       "counts only with --detect-local-mode BridgeInterface and InterfaceNamePrefix",
		"explain --manifests " + cluster + " -f - --detect-local-mode None":                                                    "is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix",
		"explain --manifests " + cluster + " -f - --service-proxy-name a/b":                                                    "cannot be the value of a label",
		"explain --manifests " + cluster + " -f - --cluster-cdir 10.0.0.0/8":                                                   "did you mean --cluster-cidr?",
	} {
		_, _, err := runCommand("", strings.Fields(args)...)
		check.Errorf(t, err, want, "%s", args)
	}
}
