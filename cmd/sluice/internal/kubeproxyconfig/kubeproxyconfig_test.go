package kubeproxyconfig

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The files that kubeadm and kind put into a cluster, as they are.
func TestFilesOfClusters(t *testing.T) {
	for _, test := range []struct {
		file    string
		ignored string
	}{
		{"kubeadm.yaml", ""},
		{"kind.yaml", ""},
	} {
		f, err := Load(filepath.Join("testdata", test.file))
		if err != nil {
			t.Errorf("%s: %v", test.file, err)
			continue
		}
		if len(f.Warnings) > 0 {
			t.Errorf("%s: warnings %q", test.file, f.Warnings)
		}
		check.Equalf(t, strings.Join(f.Ignored(), " "), test.ignored, "%s: ignored", test.file)
		c := f.Config
		if c.HealthzBindAddress != "0.0.0.0:10256" || c.MetricsBindAddress != "127.0.0.1:10249" || c.ClusterCIDR != "10.244.0.0/16" ||
			c.ClientConnection.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" || c.ClientConnection.QPS != 5 || *c.OOMScoreAdj != -999 {
			t.Errorf("%s: %+v", test.file, c)
		}
	}
}

const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func TestDefaults(t *testing.T) {
	for _, test := range []struct{ text, healthz, metrics string }{
		{"", "0.0.0.0:10256", "127.0.0.1:10249"},
		{"bindAddress: '::'", "[::]:10256", "[::1]:10249"},
		{"healthzBindAddress: 127.0.0.1\nmetricsBindAddress: '::1'", "127.0.0.1:10256", "[::1]:10249"},
		{"healthzBindAddress: 127.0.0.1:1\nmetricsBindAddress: '[::1]:2'", "127.0.0.1:1", "[::1]:2"},
	} {
		f, err := Parse([]byte(head + test.text))
		if err != nil {
			t.Errorf("%q: %v", test.text, err)
			continue
		}
		if f.Config.HealthzBindAddress != test.healthz || f.Config.MetricsBindAddress != test.metrics {
			t.Errorf("%q: %s and %s", test.text, f.Config.HealthzBindAddress, f.Config.MetricsBindAddress)
		}
	}
}

func TestErrors(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"{}", "apiVersion and kind are missing"},
		{"apiVersion: v1\nkind: ConfigMap", "it holds a ConfigMap of v1"},
		{head + "mode: kernelspace", "mode: \"kernelspace\" is not one of"},
		{head + "mode: userspace", "not one of iptables, ipvs, nftables"},
		{head + "bindAddress: here", "bindAddress"},
		{head + "healthzBindAddress: 1.2.3.4:0", "port 0 is not between 1 and 65535"},
		{head + "metricsBindAddress: nowhere:1", "nowhere is not an IP address"},
		{head + "oomScoreAdj: 1001", "oomScoreAdj: 1001"},
		{head + "clientConnection: {burst: -1}", "clientConnection.burst: -1"},
		{head + "configSyncPeriod: -1s", "configSyncPeriod: -1s"},
		{head + "iptables: {syncPeriod: 1s, minSyncPeriod: 2s}", "iptables.minSyncPeriod: 2s is greater than syncPeriod, 1s"},
		{head + "nftables: {masqueradeBit: 32}", "nftables.masqueradeBit: 32"},
		{head + "conntrack: {maxPerCore: -1}", "conntrack.maxPerCore: -1 is negative"},
		{head + "conntrack: {min: -1}", "conntrack.min: -1 is negative"},
		{head + "conntrack: {tcpEstablishedTimeout: -1s}", "conntrack.tcpEstablishedTimeout: -1s is negative"},
		{head + "conntrack: {tcpCloseWaitTimeout: -1s}", "conntrack.tcpCloseWaitTimeout: -1s is negative"},
		{head + "detectLocalMode: Guess", "detectLocalMode: \"Guess\""},
		{head + "detectLocalMode: BridgeInterface", "detectLocal.bridgeInterface"},
		{head + "clusterCIDR: 10.0.0.0/8,10.1.0.0/16", "more than one range of a family"},
		{head + "clusterCIDR: pods", "\"pods\" is not a CIDR"},
		{head + "nodePortAddresses: [primary, primary]", "primary is there twice"},
		{head + "nodePortAddresses: [home]", "\"home\" is neither"},
		{head + "bindAddress: [a", "yaml"},
		{head + "mode: [iptables]", "not a KubeProxyConfiguration: "},
	} {
		check.Errorf(t, must.Err(Parse([]byte(test.text))), test.want, "%q", test.text)
	}
}

// What does not exist is a warning; the rest is used (A.9).
func TestLenientSecondAttempt(t *testing.T) {
	f, err := Parse([]byte(head + "resourceContainer: /kube-proxy\nhostnameOverride: a\n"))
	must.OK(t, err)
	if len(f.Warnings) != 1 || !strings.Contains(f.Warnings[0], "resourceContainer") || f.Config.HostnameOverride != "a" {
		t.Errorf("warnings %q, config %+v", f.Warnings, f.Config)
	}
	f, err = Parse([]byte(head + "mode: iptables\nmode: nftables\n"))
	if err != nil || len(f.Warnings) != 1 || !strings.Contains(f.Warnings[0], `: line 4: key "mode" already set`) {
		t.Errorf("a field twice: %v, warnings %q", err, f.Warnings)
	}
}

// Each field that does not exist is named: a typo does not hide behind an old field.
func TestAllUnknownFieldsAreNamed(t *testing.T) {
	f, err := Parse([]byte(head + `
resourceContainer: /kube-proxy
nodePortAdresses: [10.0.0.0/8]
proxyRange: ""
iptables: {masqueradeall: true}
clusterCIDR: 10.244.0.0/16
`))
	must.OK(t, err)
	want := []string{
		`unknown field "iptables.masqueradeall"; did you mean "iptables.masqueradeAll"?`,
		`unknown field "nodePortAdresses"; did you mean "nodePortAddresses"?`,
		`unknown field "proxyRange"`,
		`unknown field "resourceContainer"`,
	}
	slices.Sort(f.Warnings)
	if !slices.Equal(f.Warnings, want) || f.Config.ClusterCIDR != "10.244.0.0/16" || f.Config.IPTables.MasqueradeAll {
		t.Errorf("warnings %q, want %q", f.Warnings, want)
	}
}

func TestIgnored(t *testing.T) {
	f, err := Parse([]byte(head + `
mode: ipvs
ipvs: {scheduler: lc, strictARP: true}
iptables: {masqueradeBit: 14, masqueradeAll: true, syncPeriod: 10s}
conntrack: {maxPerCore: 0, min: 100, udpTimeout: 10s}
featureGates: {Some: true}
`))
	must.OK(t, err)
	want := []string{"featureGates.Some", "iptables.syncPeriod", "ipvs.strictARP"}
	check.EqualSlicesf(t, f.Ignored(), want, "ignored")
}

// What --write-config-to writes can be read, and means the same.
func TestWriteAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	must.OK(t, Write(path, Default()))
	f := must.Get(Load(path))(t)
	if len(f.Warnings) > 0 || len(f.Ignored()) > 0 || f.Config.IPTables.SyncPeriod.Duration != 30*time.Second {
		t.Errorf("%q, %q, %+v", f.Warnings, f.Ignored(), f.Config)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"kubeadm.yaml", "kind.yaml"} {
		text := must.Read(f, filepath.Join("testdata", name))
		f.Add(text)
	}
	f.Fuzz(func(_ *testing.T, text []byte) {
		if file, err := Parse(text); err == nil {
			file.Ignored()
		}
	})
}
