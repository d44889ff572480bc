package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// runFlags returns the options that sluice run has with these arguments, complete
// and checked.
func runFlags(t *testing.T, args ...string) (*runOptions, error) {
	t.Helper()
	o := newRunOptions()
	cmd := &cobra.Command{Use: "run"}
	o.register(cmd)
	if err := cmd.ParseFlags(args); err != nil {
		return o, err
	}
	if err := o.readConfig(cmd.Flags()); err != nil {
		return o, err
	}
	return o, o.validate()
}

// kube-proxy's flags, as its help lists them in v1.37, and two that its libraries add in other versions.
var kubeProxyFlags = strings.Fields(`--bind-address=0.0.0.0 --bind-address-hard-fail --cleanup --cluster-cidr=10.0.0.0/8
	--config-sync-period=15m --conntrack-max-per-core=0 --conntrack-min=1 --conntrack-tcp-be-liberal --conntrack-tcp-timeout-close-wait=1h
	--conntrack-tcp-timeout-established=24h --conntrack-udp-timeout=0s --conntrack-udp-timeout-stream=0s --detect-local-mode=ClusterCIDR
	--feature-gates=A=true --healthz-bind-address=0.0.0.0:10256 --healthz-port=1 --hostname-override=n --init-only --iptables-localhost-nodeports
	--iptables-masquerade-bit=14 --iptables-min-sync-period=1s --iptables-sync-period=30s --ipvs-exclude-cidrs=10.0.0.0/8 --ipvs-min-sync-period=0s
	--ipvs-scheduler=rr --ipvs-strict-arp --ipvs-sync-period=30s --ipvs-tcp-timeout=0s --ipvs-tcpfin-timeout=0s --ipvs-udp-timeout=0s
	--kube-api-burst=10 --kube-api-content-type=application/json --kube-api-qps=5 --kubeconfig=/f --log-flush-frequency=5s --log-json-info-buffer-size=0
	--log-json-split-stream --log-text-info-buffer-size=0 --log-text-split-stream --logging-format=text --masquerade-all --master=https://h --metrics-bind-address=127.0.0.1:10249
	--metrics-port=1 --nodeport-addresses=primary --oom-score-adj=-999 --profiling --proxy-mode=iptables
	--show-hidden-metrics-for-version=1.36 --v=2 --vmodule=a=1 --write-config-to=/f --boot_id_file=/b --machine-id-file=/m`)

func TestKubeProxyFlagsAreAccepted(t *testing.T) {
	o := must.Get(runFlags(t, kubeProxyFlags...))(t)
	given := 0
	for _, f := range o.ignored {
		if f.given {
			given++
		}
	}
	check.Equalf(t, given, len(meaningless), "flags without a meaning that were given")
	if o.cluster.minSyncPeriod != time.Second || o.oomScoreAdj != -999 || !o.profiling || !o.masqueradeAll {
		t.Errorf("%+v", o)
	}
	for _, interfaces := range [][]string{
		{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cbr0"},
		{"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"},
	} {
		if _, err := runFlags(t, interfaces...); err != nil {
			t.Errorf("%q: %v", interfaces, err)
		}
	}
}

// kube-proxy's times of UDP flows count, those of the file before those of
// flags, and our own flags before both.
func TestUDPTimeoutsOfKubeProxy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nconntrack: {udpTimeout: 7s}\n"
	must.OK(t, os.WriteFile(file, []byte(text), 0o600))
	for _, test := range []struct {
		args        string
		udp, stream time.Duration
	}{
		{"", 30 * time.Second, 2 * time.Minute},
		{"--conntrack-udp-timeout=10s --conntrack-udp-timeout-stream=40s", 10 * time.Second, 40 * time.Second},
		{"--conntrack-udp-timeout=10s --udp-timeout=5s --conntrack-udp-timeout-stream=0s", 5 * time.Second, 2 * time.Minute},
		{"--config=" + file + " --conntrack-udp-timeout=10s --conntrack-udp-timeout-stream=40s", 7 * time.Second, 2 * time.Minute},
		{"--config=" + file + " --udp-timeout=5s", 5 * time.Second, 2 * time.Minute},
	} {
		o, err := runFlags(t, append(strings.Fields(test.args), "--kubeconfig=/f")...)
		if err != nil || o.node.Datagram.Timeout != test.udp || o.node.Datagram.StreamTimeout != test.stream {
			t.Errorf("%q: %v and %v, %v; want %v and %v", test.args, o.node.Datagram.Timeout, o.node.Datagram.StreamTimeout, err, test.udp, test.stream)
		}
	}
	for _, flag := range []string{"--conntrack-udp-timeout=-1s", "--conntrack-max-per-core=-1", "--conntrack-min=-1", "--conntrack-tcp-timeout-established=-1s", "--conntrack-tcp-timeout-close-wait=1ms"} {
		name, _, _ := strings.Cut(flag, "=")
		check.Errorf(t, must.Err(runFlags(t, "--kubeconfig=/f", flag)), name, "%s", flag)
	}
}

// A run with manifests opens no port that was not asked for; in a cluster they
// are where kube-proxy has them.
func TestDefaultPorts(t *testing.T) {
	dir := t.TempDir()
	for _, test := range []struct{ args, healthz, metrics string }{
		{"--manifests " + dir, "", ""},
		{"--manifests " + dir + " --healthz-bind-address 127.0.0.1:1", "127.0.0.1:1", ""},
		{"--kubeconfig /f", "0.0.0.0:10256", "127.0.0.1:10249"},
		{"--kubeconfig /f --bind-address ::", "[::]:10256", "[::1]:10249"},
		{"--kubeconfig /f --healthz-port 0 --metrics-port 0", "", ""},
		{"--kubeconfig /f --healthz-bind-address 127.0.0.1", "127.0.0.1:10256", "127.0.0.1:10249"},
	} {
		o, err := runFlags(t, strings.Fields(test.args)...)
		if err != nil || o.node.HealthzAddress != test.healthz || o.node.MetricsAddress != test.metrics {
			t.Errorf("%s: %q and %q, %v; want %q and %q", test.args, o.node.HealthzAddress, o.node.MetricsAddress, err, test.healthz, test.metrics)
		}
	}
}

func TestOneSourceOnly(t *testing.T) {
	check.Errorf(t, must.Err(runFlags(t, "--manifests", t.TempDir(), "--kubeconfig", "/f")), "exclude each other", "two sources")
}

// The files of kubeadm and kind start the program as they are; --hostname-override
// goes before the file.
func TestConfigFilesOfClusters(t *testing.T) {
	for _, test := range []struct {
		file   string
		period time.Duration
	}{{"kubeadm.yaml", 0}, {"kind.yaml", time.Second}} {
		o, err := runFlags(t, "--config", "internal/kubeproxyconfig/testdata/"+test.file, "--hostname-override", "Node-1")
		if err != nil {
			t.Errorf("%s: %v", test.file, err)
			continue
		}
		if o.hostname != "node-1" || o.cluster.connection.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" || o.cluster.minSyncPeriod != test.period ||
			!slices.Equal(o.clusterCIDRs.prefixes, prefixes{netip.MustParsePrefix("10.244.0.0/16")}) || o.node.HealthzAddress != "0.0.0.0:10256" || len(o.notes) != 0 {
			t.Errorf("%s: %+v", test.file, o)
		}
	}
}

func TestModesOfKubeProxy(t *testing.T) {
	for _, test := range []struct {
		mode      string
		addresses []string
		loopback  bool
		text      string
	}{
		{"", nil, true, "iptables"},
		{"iptables", nil, true, "iptables"},
		{"ipvs", nil, true, "ipvs"},
		{"nftables", []string{"primary"}, false, "nftables"},
	} {
		args := []string{"--kubeconfig=/f"}
		if test.mode != "" {
			args = append(args, "--proxy-mode="+test.mode)
		}
		o, err := runFlags(t, args...)
		if err != nil || !slices.Equal(o.nodePortAddresses, test.addresses) || o.noLocalhostNodePorts == test.loopback || o.proxyModeText() != test.text {
			t.Errorf("%q: %v %v %q, %v", test.mode, o.nodePortAddresses, o.noLocalhostNodePorts, o.proxyModeText(), err)
		}
	}
	check.Errorf(t, must.Err(runFlags(t, "--kubeconfig=/f", "--proxy-mode=userspace")), "iptables, ipvs, nftables", "an unknown mode")
}

// TestDependenciesAreDocumented compares docs/dependencies.md with go.mod.
func TestDependenciesAreDocumented(t *testing.T) {
	mod := must.Read(t, "../../go.mod")
	text := must.Read(t, "../../docs/dependencies.md")
	var direct, documented []string
	for _, m := range regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(string(mod), -1) {
		direct = append(direct, m[1])
	}
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*`) \\|").FindAllStringSubmatch(string(text), -1) {
		for _, name := range strings.Split(row[1], ", ") {
			documented = append(documented, strings.Trim(name, "`"))
		}
	}
	slices.Sort(direct)
	slices.Sort(documented)
	if !slices.Equal(direct, documented) {
		t.Errorf("go.mod has\n%s\nand docs/dependencies.md\n%s", strings.Join(direct, "\n"), strings.Join(documented, "\n"))
	}
}

// TestExternalIPsThatKubeProxyForbidsStayForbidden: the one feature gate that is a
// restriction counts, by flag and in the file, whatever --external-ips says.
func TestExternalIPsThatKubeProxyForbidsStayForbidden(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	config := func(gates string) string {
		text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nfeatureGates: {" + gates + "}\n"
		must.OK(t, os.WriteFile(file, []byte(text), 0o600))
		return "--config=" + file
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "all"},
		{[]string{"--external-ips=none"}, "none"},
		{[]string{"--external-ips=192.0.2.0/24,2001:db8::/32"}, "192.0.2.0/24,2001:db8::/32"},
		{[]string{"--feature-gates=AllowServiceExternalIPs=true"}, "all"},
		{[]string{"--feature-gates=AllowServiceExternalIPs=false"}, "none"},
		{[]string{"--feature-gates=A=true,AllowServiceExternalIPs=false", "--feature-gates=B=false"}, "none"},
		{[]string{"--feature-gates=AllowServiceExternalIPs=false", "--external-ips=all"}, "none"},
		{[]string{config("AllowServiceExternalIPs: false")}, "none"},
		{[]string{config("AllowServiceExternalIPs: false"), "--external-ips=10.0.0.0/8"}, "none"},
	} {
		if o, err := runFlags(t, test.args...); err != nil || o.externalIPs.String() != test.want {
			t.Errorf("%q: %s, %v, want %s", test.args, o.externalIPs.String(), err, test.want)
		}
	}
	if o, err := runFlags(t, config("AllowServiceExternalIPs: true, Other: true")); err != nil || o.externalIPs.String() != "all" || len(o.notes) != 1 {
		t.Errorf("%v, %v, notes %q", o.externalIPs, err, o.notes)
	}
	for _, wrong := range [][]string{{"--feature-gates=AllowServiceExternalIPs=perhaps"}, {"--feature-gates=AllowServiceExternalIP=false"}, {config("allowServiceExternalIPs: false")}, {"--external-ips=some"}} {
		if _, err := runFlags(t, wrong...); err == nil {
			t.Errorf("%q: no error", wrong)
		}
	}
}
