package main

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// kube-proxy takes its whole configuration from --config, but the API server's
// address, the node's name and the log's settings. The log names the flags that the
// file overrides.
func TestFlagsBesideAConfigurationFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhostnameOverride: other\n" +
		"iptables: {minSyncPeriod: 2s}\nlogging: {verbosity: 1}\n"
	must.OK(t, os.WriteFile(file, []byte(text), 0o600))
	o, err := runFlags(t, append(slices.Clone(kubeProxyFlags), "--config="+file, "--min-sync-period=3s",
		"--pod-bridge-interface=cbr0", "--pod-interface-name-prefix=veth", "--proxy-mode=userspace", "--detect-local-mode=Guess", "--cluster-cidr=pods")...)
	must.OK(t, err)
	if o.hostname != "n" || o.cluster.connection.Master != "https://h" || o.node.Verbosity != 2 || o.cluster.minSyncPeriod != 3*time.Second {
		t.Errorf("the node %q, the API server %q, verbosity %d, minimum period %s: the flags are not used",
			o.hostname, o.cluster.connection.Master, o.node.Verbosity, o.cluster.minSyncPeriod)
	}
	if len(o.clusterCIDRs.prefixes) > 0 || o.proxyMode.value != "iptables" || o.detectLocal.value != detectClusterCIDR || o.masqueradeAll || o.profiling || o.cluster.connection.Kubeconfig != "" {
		t.Errorf("flags are used that the file overrides: %+v", o)
	}
	var log bytes.Buffer
	o.logIgnored(zerolog.New(&log))
	var named []string
	for line := range strings.Lines(log.String()) {
		var l struct {
			Flags   []string
			Message string
		}
		must.OK(t, json.Unmarshal([]byte(line), &l))
		if _, list, ok := strings.Cut(l.Message, "overrides, as with kube-proxy: "); ok {
			named = append(named, strings.Split(list, ", ")...)
		}
		named = append(named, l.Flags...)
	}
	// Of kube-proxy's flags each is named, or is used.
	used := strings.Fields("--cleanup --write-config-to --init-only --feature-gates --hostname-override --master --logging-format --v")
	for _, flag := range kubeProxyFlags {
		name, _, _ := strings.Cut(strings.ReplaceAll(flag, "_", "-"), "=")
		if slices.Contains(named, name) == slices.Contains(used, name) {
			t.Errorf("%s is both used and named in the log, or neither: %q", name, named)
		}
	}

	o, err = runFlags(t, "--config="+file, "--hostname-override=")
	if err != nil || o.hostname != "other" || o.cluster.minSyncPeriod != 2*time.Second || len(o.notes) > 0 {
		t.Errorf("without flags: the node %q, minimum period %s, notes %q, %v", o.hostname, o.cluster.minSyncPeriod, o.notes, err)
	}
}

func TestLateChoices(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"--proxy-mode= --detect-local-mode= --cluster-cidr=", ""},
		{"--cluster-cidr=10.244.0.0/16 --cluster-cidr=pods", `--cluster-cidr: "pods" is not a CIDR`},
		{"--proxy-mode=userspace", "iptables, ipvs, nftables"},
		{"--detect-local-mode=Guess", "ClusterCIDR, NodeCIDR"},
	} {
		_, err := runFlags(t, append(strings.Fields(test.args), "--kubeconfig=/f")...)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.args, err, test.want)
		}
	}
}

func TestVersion(t *testing.T) {
	for _, args := range []string{"version", "--version", "run --version", "run --version=raw --config=/nowhere"} {
		if got := output(t, args); !strings.HasPrefix(got, "sluice "+version+" (go") || strings.Count(got, "\n") != 1 {
			t.Errorf("%s: %q", args, got)
		}
	}
	var v map[string]string
	if err := json.Unmarshal([]byte(output(t, "version -o json")), &v); err != nil || v["version"] != version || v["goVersion"] == "" || v["platform"] != platform {
		t.Errorf("as JSON: %v, %v", v, err)
	}
}

// output returns what a command of the program writes to standard output.
func output(t *testing.T, args string) string {
	t.Helper()
	var b bytes.Buffer
	root := newRootCommand()
	root.SetOut(&b)
	root.SetArgs(strings.Fields(args))
	if err := root.Execute(); err != nil {
		t.Errorf("%s: %v", args, err)
	}
	return b.String()
}

// TestConntrackSettingsInKubeProxysPlace: in a cluster all that kube-proxy sets is set,
// with and without a configuration file; flags change it, and nothing is set beside
// another proxy. Without a cluster, only what flags name is set.
func TestConntrackSettingsInKubeProxysPlace(t *testing.T) {
	file := writeFile(t, "config.yaml", proxyConfig+"conntrack: {maxPerCore: 0, tcpCloseWaitTimeout: 2h, tcpBeLiberal: true, udpTimeout: 7s}\n")
	usual := writeFile(t, "usual.yaml", proxyConfig)
	least := tracking.MaxFor(32768, 131072)
	for _, test := range []struct {
		args string
		want tracking.Settings
	}{
		{"", tracking.Settings{Max: least, Raise: true, Established: 24 * time.Hour, CloseWait: time.Hour}},
		{"--service-proxy-name=sluice", tracking.Settings{}},
		{"--manifests=" + t.TempDir(), tracking.Settings{}},
		{"--manifests=" + t.TempDir() + " --conntrack-tcp-timeout-close-wait=1h", tracking.Settings{CloseWait: time.Hour}},
		{"--config=" + usual, tracking.Settings{Max: least, Established: 24 * time.Hour, CloseWait: time.Hour}},
		{"--config=" + file + " --conntrack-min=9000000", tracking.Settings{Established: 24 * time.Hour, CloseWait: 2 * time.Hour, BeLiberal: true, UDP: 7 * time.Second}},
		{"--config=" + file + " --service-proxy-name=sluice", tracking.Settings{}},
		{"--conntrack-tcp-timeout-close-wait=1h --conntrack-tcp-be-liberal --conntrack-udp-timeout-stream=40s", tracking.Settings{Max: least, Raise: true, Established: 24 * time.Hour, CloseWait: time.Hour, BeLiberal: true, UDPStream: 40 * time.Second}},
		{"--conntrack-max-per-core=0 --conntrack-min=9000000 --conntrack-tcp-timeout-close-wait=0s", tracking.Settings{Established: 24 * time.Hour}}, // as k3s runs kube-proxy
		{"--conntrack-min=9000000", tracking.Settings{Max: 9000000, Established: 24 * time.Hour, CloseWait: time.Hour}},
	} {
		args := strings.Fields(test.args)
		if !strings.Contains(test.args, "--manifests") {
			args = append(args, "--kubeconfig=/f")
		}
		o, err := runFlags(t, args...)
		if err != nil || o.conntrack.settings != test.want {
			t.Errorf("%q: %+v, %v, want %+v", test.args, o.conntrack.settings, err, test.want)
		}
	}
}

// TestDefaultRateOfRecords: only what the kubelet rotates is bounded by itself.
func TestDefaultRateOfRecords(t *testing.T) {
	dir := t.TempDir()
	for args, want := range map[string]int{
		"--kubeconfig /f":                               clusterRecordRate,
		"--kubeconfig /f --access-log-rate 0":           0,
		"--kubeconfig /f --access-log-rate 500":         500,
		"--kubeconfig /f --access-log /var/log/records": 0,
		"--manifests " + dir:                            0,
		"--manifests " + dir + " --access-log-rate 7":   7,
	} {
		if o, err := runFlags(t, strings.Fields(args)...); err != nil || o.recordRate() != want {
			t.Errorf("%s: %d, %v, want %d", args, o.recordRate(), err, want)
		}
	}
}

// Options that do nothing where they are given are named.
func TestNotes(t *testing.T) {
	var log bytes.Buffer
	o := newRunOptions()
	o.manifests, o.cluster.podNames = t.TempDir(), true
	o.serviceProxyName, o.serviceCIDRs = "other", prefixes{netip.MustParsePrefix("10.96.0.0/12")}
	o.logNotes(zerolog.New(&log))
	for _, want := range []string{"--client-pod-names has no effect", "--service-cidr is not used"} {
		check.Containsf(t, log.String(), want, "no %q in %s", want, &log)
	}
}
