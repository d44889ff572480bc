package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// A ConfigMap's files change by exchanging a folder behind a symlink.
func TestWatchFile(t *testing.T) {
	dir := t.TempDir()
	put := func(folder, text string) {
		t.Helper()
		must.OK(t, os.MkdirAll(filepath.Join(dir, folder), 0o700))
		must.OK(t, os.WriteFile(filepath.Join(dir, folder, "config.conf"), []byte(text), 0o600))
		must.OK(t, os.Symlink(folder, filepath.Join(dir, "..next")))
		must.OK(t, os.Rename(filepath.Join(dir, "..next"), filepath.Join(dir, "..data")))
	}
	put("..1", "a")
	path := filepath.Join(dir, "config.conf")
	must.OK(t, os.Symlink("..data/config.conf", path))
	w, ended := watch(t, path, "a", nil)
	put("..2", "a") // the same again is no change
	for i := 0; ; i++ {
		select {
		case err := <-ended:
			if err != errChanged || string(w.content) != strings.Repeat("b", len(w.content)) {
				t.Errorf("it ended with %v and %q", err, w.content)
			}
			return
		case <-time.After(10 * time.Millisecond):
			put("..x"+strings.Repeat("x", i%50), strings.Repeat("b", i+1)) // until the watch has begun
		}
	}
}

var errChanged = errors.New("has changed")

// watch follows a file until it has another content than this one.
func watch(t *testing.T, path, content string, looks <-chan time.Time) (w *fileWatch, ended chan error) {
	w, ended = &fileWatch{path: path, content: []byte(content), looks: looks, log: zerolog.Nop()}, make(chan error, 1)
	go func() { ended <- w.run(t.Context(), func() error { return errChanged }) }()
	return w, ended
}

// A change while the program begins, after it has read the file, is a change.
func TestFileThatHasChangedSinceItWasRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	must.OK(t, os.WriteFile(path, []byte("b"), 0o600))
	if _, ended := watch(t, path, "a", nil); <-ended != errChanged {
		t.Error("it is not seen")
	}
}

// Where no event tells of a change, the next look sees it: the folder cannot be
// watched, as without inotify instances, or the file is a symlink to another folder.
func TestFileWithoutEvents(t *testing.T) {
	dir := t.TempDir()
	for _, in := range []string{"missing", "elsewhere"} {
		folder := filepath.Join(dir, in)
		path := filepath.Join(folder, "config.conf")
		if in == "elsewhere" {
			path = filepath.Join(t.TempDir(), "config.conf")
			must.OK(t, os.Symlink(filepath.Join(folder, "config.conf"), path))
		}
		looks := make(chan time.Time)
		_, ended := watch(t, path, "a", looks)
		looks <- time.Now() // there is no file: this is no change, and no reason to end
		must.OK(t, os.Mkdir(folder, 0o700))
		must.OK(t, os.WriteFile(filepath.Join(folder, "config.conf"), []byte("b"), 0o600))
		var err error
		select {
		case looks <- time.Now():
			err = <-ended
		case err = <-ended: // the first look came late, and has seen it
		}
		if err != errChanged {
			t.Errorf("%s: it ended with %v", in, err)
		}
	}
}

// reread has the values of all flags that were given, whatever their type is.
func TestFlagsAreGivenAgain(t *testing.T) {
	args := strings.Fields(`--manifests=` + t.TempDir() + ` --hostname-override=N --service-cidr=10.96.0.0/16,fd00::/112 --service-cidr=10.97.0.0/16 --node-ip=192.0.2.1
		--nodeport-addresses=primary,10.0.0.0/8 --external-ips=none --feature-gates=A=true,B=false --dial-timeouts=1s,2s --reply-ports=61000-61010
		--steer-mark=0x10000 --balancer=random --ipvs-strict-arp --idle-timeout=1h -v=4 --masquerade-all --metrics-per-service=false --max-pipes=7
		--on-config-change=exit --kube-api-qps=7.5 --conntrack-tcp-timeout-close-wait=2h`)
	args = append(args, "--access-log-filter=namespace!=kube-system end!=client_fin,endpoint_fin",
		"--access-log-sample=1/1000 end=client_fin,endpoint_fin attempts=1", "--access-log-sample=1/2 service=shop/*", "--web-allowed-hosts=", "--version=v1.37.0")
	values := func(o *runOptions, given [][2]string) map[string]string {
		t.Helper()
		cmd := &cobra.Command{Use: "run"}
		o.register(cmd)
		var err error
		if given == nil {
			err = cmd.ParseFlags(args)
			given = givenFlags(cmd.Flags())
		} else {
			for _, f := range given {
				err = errors.Join(err, cmd.Flags().Set(f[0], f[1]))
			}
		}
		must.OK(t, err)
		o.given, o.flags = given, cmd.Flags()
		out := o.values()
		cmd.Flags().Visit(func(f *pflag.Flag) { out["given "+f.Name] = "yes" })
		return out
	}
	first := newRunOptions()
	want := values(first, nil)
	got := values(newRunOptions(), first.given)
	for name, value := range want {
		check.Equalf(t, got[name], value, "--%s again", name)
	}
	if len(got) != len(want) || len(first.given) < 19 {
		t.Errorf("%d flags and %d, %d of them given", len(got), len(want), len(first.given))
	}
}

// configured returns the options of a configuration file with this content.
func configured(t *testing.T, text string) *runOptions {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.conf")
	must.OK(t, os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+text), 0o600))
	return must.Get(runFlags(t, "--config="+file, "--hostname-override=n"))(t)
}

// Each field of the file that means something is applied at once or needs a restart.
func TestChangesOfTheConfigurationFile(t *testing.T) {
	for _, test := range []struct{ before, after, atOnce, restart string }{
		{"", "# nothing", "", ""},
		{"", "clusterCIDR: 10.0.0.0/8", "clusterCIDR", ""},
		{"clusterCIDR: 10.0.0.0/8", "", "clusterCIDR", ""},
		{"nodePortAddresses: [primary]", "nodePortAddresses: [10.0.0.0/8]", "nodePortAddresses", ""},
		{"iptables: {masqueradeAll: true}", "iptables: {localhostNodePorts: false}", "iptables.localhostNodePorts iptables.masqueradeAll", ""},
		{"mode: iptables", "mode: nftables", "mode", ""},
		{"", "logging: {verbosity: 4}", "logging.verbosity", ""},
		{"", "oomScoreAdj: 5", "oomScoreAdj", ""},
		{"", "conntrack: {tcpCloseWaitTimeout: 2h, udpTimeout: 5s}", "conntrack.tcpCloseWaitTimeout", "conntrack.udpTimeout"},
		{"", "detectLocalMode: NodeCIDR", "detectLocalMode", ""},
		{"", "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cbr0}", "", "detectLocal.bridgeInterface detectLocalMode"},
		{"", "healthzBindAddress: 0.0.0.0:10356\nmetricsBindAddress: 0.0.0.0:1", "", "healthzBindAddress metricsBindAddress"},
		{"", "clientConnection: {kubeconfig: /k, qps: 50}", "", "clientConnection.kubeconfig clientConnection.qps"},
		{"", "featureGates: {AllowServiceExternalIPs: false, Other: true}", "", "featureGates.AllowServiceExternalIPs"},
		{"", "iptables: {minSyncPeriod: 5s}", "iptables.minSyncPeriod", ""},
		{"", "iptables: {syncPeriod: 5m}\nipvs: {strictARP: true}", "", ""},
		{"", "mode: ipvs\nipvs: {scheduler: lc}", "mode", "ipvs.scheduler"},
	} {
		o, next := configured(t, test.before), configured(t, test.after)
		atOnce, restart := sortFields(kubeproxyconfig.Changed(o.kubeProxy, next.kubeProxy), o, next)
		if !slices.Equal(atOnce, strings.Fields(test.atOnce)) || !slices.Equal(restart, strings.Fields(test.restart)) {
			t.Errorf("%q to %q: %v at once and %v with a restart, want %s and %s", test.before, test.after, atOnce, restart, test.atOnce, test.restart)
		}
	}
}

// kube-proxy takes a negative QPS, which means no limit.
func TestConfigurationWithoutLimitOfRequests(t *testing.T) {
	if o := configured(t, "clientConnection: {qps: -1}\n"); o.cluster.connection.QPS != -1 {
		t.Errorf("the QPS is %v, and -1 is given", o.cluster.connection.QPS)
	}
}
