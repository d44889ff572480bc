package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// kubeProxyOptions are flags that only kube-proxy has.
type kubeProxyOptions struct {
	configFile         string
	onConfigChange     choice
	writeConfigTo      string
	cleanup, initOnly  bool
	bindAddress        string
	hardFail           bool
	profiling          bool
	proxyMode          lateChoice
	ipvsScheduler      string
	localhostNodePorts bool
	oomScoreAdj        int
	healthzPort        int
	metricsPort        int
	conntrackUDP       time.Duration // 0: as --udp-timeout says
	conntrackUDPStream time.Duration // likewise
	conntrack          conntrackOptions
	featureGates       []string
	ignored            []*ignoredFlag

	configText []byte                  // the configuration file as it was read
	kubeProxy  *kubeproxyconfig.Config // what /configz shows; nil without --config
	notes      []string                // for the log, once there is one
}

func (o *kubeProxyOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.configFile, "config", "", "kube-proxy's configuration file; it overrides kube-proxy's flags, except --hostname-override, --master and those of the log, and the log names those it overrides")
	o.onConfigChange = newChoice(configApply, configExit)
	f.Var(&o.onConfigChange, "on-config-change", "when the file of --config changes: apply what can be applied and log what needs a restart, or exit with an error, as kube-proxy does")
	f.StringVar(&o.writeConfigTo, "write-config-to", "", "write kube-proxy's default configuration to this file, and exit")
	f.BoolVar(&o.cleanup, "cleanup", false, "do what sluice cleanup does, and exit")
	f.BoolVar(&o.initOnly, "init-only", false, "exit at once: nothing needs preparation")
	f.StringVar(&o.bindAddress, "bind-address", "", "this node's own address, as --node-ip; an IPv6 address moves the default ports of /healthz and /metrics to IPv6")
	f.BoolVar(&o.hardFail, "bind-address-hard-fail", false, "exit if the port of /healthz or of /metrics is taken")
	f.BoolVar(&o.profiling, "profiling", false, "serve /debug/pprof beside the metrics")
	o.proxyMode.allowed = []string{"iptables", "ipvs", "nftables"}
	f.Var(&o.proxyMode, "proxy-mode", "kube-proxy's mode: sets the defaults for node ports; --redirect sets the steering mode")
	f.StringVar(&o.ipvsScheduler, "ipvs-scheduler", "", "with --proxy-mode ipvs, the default of --balancer")
	f.BoolVar(&o.localhostNodePorts, "iptables-localhost-nodeports", true, "serve node ports on 127.0.0.0/8 where all addresses have them")
	f.IntVar(&o.oomScoreAdj, "oom-score-adj", 0, "the kernel's OOM score adjustment of this process, -1000 to 1000 (default: -999 with --config, else as it is)")
	f.DurationVar(&o.conntrackUDP, "conntrack-udp-timeout", 0, "kube-proxy's name of --udp-timeout, which wins; 0 = not set")
	f.DurationVar(&o.conntrackUDPStream, "conntrack-udp-timeout-stream", 0, "the same for --udp-stream-timeout")
	o.conntrack.register(f)
	f.StringSliceVar(&o.featureGates, "feature-gates", nil, "kube-proxy's feature gates; "+externalIPsGate+"=false means --external-ips none, the others have no effect")
	f.IntVar(&o.healthzPort, "healthz-port", kubeproxyconfig.HealthzPort, "port of /healthz without --healthz-bind-address; 0 disables it")
	f.IntVar(&o.metricsPort, "metrics-port", kubeproxyconfig.MetricsPort, "port of the metrics without --metrics-bind-address; 0 disables them")
	for _, name := range []string{"healthz-port", "metrics-port"} {
		_ = f.MarkHidden(name) // kube-proxy calls them deprecated
	}
	for name, toggles := range meaningless {
		flag := &ignoredFlag{name: name}
		o.ignored = append(o.ignored, flag)
		added := f.VarPF(flag, name, "", "kube-proxy's; no effect")
		added.Hidden = true
		if toggles {
			added.NoOptDefVal = "true"
		}
	}
	slices.SortFunc(o.ignored, func(a, b *ignoredFlag) int { return cmp.Compare(a.name, b.name) })
}

// meaningless are flags of kube-proxy that are accepted and have no effect; the value
// says whether the flag is a switch.
var meaningless = map[string]bool{
	"config-sync-period": false, "show-hidden-metrics-for-version": false,
	"iptables-masquerade-bit": false, "iptables-sync-period": false,
	"ipvs-sync-period": false, "ipvs-min-sync-period": false, "ipvs-exclude-cidrs": false, "ipvs-strict-arp": true,
	"ipvs-tcp-timeout": false, "ipvs-tcpfin-timeout": false, "ipvs-udp-timeout": false,
	"log-flush-frequency": false, "log-text-split-stream": true, "log-text-info-buffer-size": false,
	"log-json-split-stream": true, "log-json-info-buffer-size": false, "vmodule": false,
	"boot-id-file": false, "machine-id-file": false,
}

// ignoredFlag accepts any value and remembers that it was given.
type ignoredFlag struct {
	name  string
	given bool
}

func (f *ignoredFlag) String() string   { return "" }
func (f *ignoredFlag) Type() string     { return "value" }
func (f *ignoredFlag) Set(string) error { f.given = true; return nil }

// logIgnored logs what was accepted and has no effect.
func (o *kubeProxyOptions) logIgnored(log zerolog.Logger) {
	for _, note := range o.notes {
		log.Warn().Str("file", o.configFile).Msg(note)
	}
	var names []string
	for _, f := range o.ignored {
		if f.given {
			names = append(names, "--"+f.name)
		}
	}
	if len(names) > 0 {
		log.Info().Strs("flags", names).Msg("kube-proxy's flags without effect")
	}
}

// logNotes logs what of the options was accepted and is not used.
func (o *runOptions) logNotes(log zerolog.Logger) {
	o.logIgnored(log)
	if o.cluster.podNames && o.manifests != "" {
		log.Warn().Msg("--client-pod-names has no effect with --manifests: the names come from an API server")
	}
	if o.serviceProxyName != "" && len(o.serviceCIDRs) > 0 {
		log.Warn().Msg("--service-cidr is not used with --service-proxy-name: the ranges are the other proxy's, and the cluster IPs of our own Services are ours")
	}
}

// externalIPsGate is the feature gate that forbids external IPs when it is off.
const externalIPsGate = "AllowServiceExternalIPs"

// takeFeatureGates applies the one gate that restricts something, from the flag and
// from the file.
func (o *runOptions) takeFeatureGates() error {
	var others []string
	forbidden := false
	for _, pair := range o.featureGates {
		name, value, _ := strings.Cut(strings.TrimSpace(pair), "=")
		if name != externalIPsGate {
			if err := checkGate(name); err != nil {
				return fmt.Errorf("--feature-gates: %w", err)
			}
			if name != "" {
				others = append(others, name)
			}
			continue
		}
		on, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("--feature-gates: %s: %q is neither true nor false", name, value)
		}
		forbidden = forbidden || !on
	}
	if len(others) > 0 {
		o.notes = append(o.notes, "feature gates that have no effect: "+strings.Join(others, ", "))
	}
	if o.kubeProxy != nil {
		for _, name := range slices.Sorted(maps.Keys(o.kubeProxy.FeatureGates)) {
			if err := checkGate(name); err != nil {
				return fmt.Errorf("--config: %s: featureGates: %w", o.configFile, err)
			}
		}
		on, given := o.kubeProxy.FeatureGates[externalIPsGate]
		forbidden = forbidden || given && !on
	}
	if forbidden {
		o.externalIPs.ExternalIPs = service.ExternalIPs{None: true}
		o.notes = append(o.notes, "external IPs are not served: the feature gate "+externalIPsGate+" is off")
	}
	return nil
}

// checkGate returns an error for a name that is almost that of the gate that restricts
// something: external IPs would be served that nobody meant to allow. kube-proxy refuses
// all names that it does not know; which these are differs between its versions.
func checkGate(name string) error {
	if name != externalIPsGate && nearest.Name(name, 5, slices.Values([]string{externalIPsGate})) != "" {
		return fmt.Errorf("%q is not known; did you mean %s?", name, externalIPsGate)
	}
	return nil
}

// readConfig reads --config, if given, into the options. flags says which flags were
// given.
func (o *runOptions) readConfig(flags *pflag.FlagSet) error {
	if o.configFile != "" {
		if err := o.loadConfig(flags); err != nil {
			return err
		}
	} else if err := o.conntrack.validate(); err != nil {
		return err
	}
	if err := o.takeFeatureGates(); err != nil {
		return err
	}
	if err := o.takeUDPTimeouts(flags); err != nil {
		return err
	}
	o.takeConntrack(flags)
	o.takeScheduler(flags)
	return nil
}

// takeScheduler uses the scheduler of kube-proxy's IPVS mode for Services without the
// annotation, unless --balancer was given.
func (o *runOptions) takeScheduler(flags *pflag.FlagSet) {
	if o.ipvsScheduler == "" || o.proxyMode.value != "ipvs" || flags.Changed("balancer") {
		return
	}
	algorithm, err := balancer.Parse(o.ipvsScheduler)
	if err != nil {
		o.notes = append(o.notes, fmt.Sprintf("ipvs.scheduler: %v; Services get %s", err, o.algorithm.value))
		return
	}
	o.algorithm.value = algorithm.String()
}

// takeUDPTimeouts uses kube-proxy's timeouts of UDP flows, unless ours were given
// (A8.8).
func (o *runOptions) takeUDPTimeouts(flags *pflag.FlagSet) error {
	for _, t := range []struct {
		own, theirs string
		value       *time.Duration
		from        time.Duration
	}{
		{"udp-timeout", "conntrack-udp-timeout", &o.node.Datagram.Timeout, o.conntrackUDP},
		{"udp-stream-timeout", "conntrack-udp-timeout-stream", &o.node.Datagram.StreamTimeout, o.conntrackUDPStream},
	} {
		if t.from < 0 {
			return fmt.Errorf("--%s: %s is negative; 0 leaves --%s as it is", t.theirs, t.from, t.own)
		}
		if t.from > 0 && !flags.Changed(t.own) {
			*t.value = t.from
		}
	}
	return nil
}

func (o *runOptions) loadConfig(flags *pflag.FlagSet) error {
	f, err := kubeproxyconfig.Load(o.configFile)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	for _, w := range f.Warnings {
		o.notes = append(o.notes, "ignored in the configuration: "+w)
	}
	if names := f.Ignored(); len(names) > 0 {
		o.notes = append(o.notes, "fields of the configuration that have no effect: "+strings.Join(names, ", "))
	}
	o.configText, o.kubeProxy = f.Text, f.Config
	if names := givenOf(flags, overriddenByFile); len(names) > 0 {
		o.notes = append(o.notes, "flags that the configuration file overrides, as with kube-proxy: "+strings.Join(names, ", "))
	}
	return o.take(f, flags)
}

// overriddenByFile are the flags that a configuration file overrides even where it
// leaves their field out. kube-proxy takes its whole configuration from the file, and
// only --hostname-override, --master and the log's flags go before it.
var overriddenByFile = []string{
	"bind-address", "bind-address-hard-fail", "profiling", "healthz-bind-address", "healthz-port", "metrics-bind-address", "metrics-port",
	"kubeconfig", "kube-api-content-type", "kube-api-qps", "kube-api-burst",
	"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix", "nodeport-addresses",
	"proxy-mode", "ipvs-scheduler", "iptables-localhost-nodeports", "masquerade-all", "iptables-min-sync-period",
	"conntrack-udp-timeout", "conntrack-udp-timeout-stream", "oom-score-adj",
	"conntrack-max-per-core", "conntrack-min", "conntrack-tcp-timeout-established", "conntrack-tcp-timeout-close-wait", "conntrack-tcp-be-liberal",
}

// givenOf returns those of some flags that were given, as they are written.
func givenOf(flags *pflag.FlagSet, names []string) (given []string) {
	for _, name := range names {
		if flags.Changed(name) {
			given = append(given, "--"+name)
		}
	}
	return given
}

// take overrides flags with the fields of a configuration file.
func (o *runOptions) take(f *kubeproxyconfig.File, flags *pflag.FlagSet) error {
	c := f.Config
	o.hostname = cmp.Or(o.hostname, c.HostnameOverride)
	o.bindAddress, o.hardFail, o.profiling = c.BindAddress, c.BindAddressHardFail, c.EnableProfiling
	o.node.HealthzAddress, o.node.MetricsAddress = c.HealthzBindAddress, c.MetricsBindAddress
	connection := &o.cluster.connection
	connection.Kubeconfig = c.ClientConnection.Kubeconfig
	connection.ContentType, connection.AcceptContentTypes = c.ClientConnection.ContentType, c.ClientConnection.AcceptContentTypes
	connection.QPS, connection.Burst = c.ClientConnection.QPS, int(c.ClientConnection.Burst)
	o.clusterCIDRs = latePrefixes{}
	if c.ClusterCIDR != "" {
		if err := o.clusterCIDRs.prefixes.Set(c.ClusterCIDR); err != nil {
			return fmt.Errorf("--config: %s: clusterCIDR: %w", o.configFile, err)
		}
	}
	o.detectLocal.value = cmp.Or(string(c.DetectLocalMode), detectClusterCIDR)
	o.podBridge, o.podPrefix = "", ""
	switch o.detectLocal.value { // the other one means nothing, and is no error
	case detectBridge:
		o.podBridge = c.DetectLocal.BridgeInterface
	case detectPrefix:
		o.podPrefix = c.DetectLocal.InterfaceNamePrefix
	}
	o.nodePortAddresses = c.NodePortAddresses
	o.proxyMode.value, o.ipvsScheduler = string(c.Mode), c.IPVS.Scheduler
	o.localhostNodePorts = *c.IPTables.LocalhostNodePorts
	// kube-proxy takes 0 for 1 s, because its rules take long to load. Here 0 is
	// what it says, and only a period that somebody has written counts.
	period := f.Given.IPTables.MinSyncPeriod.Duration
	o.masqueradeAll = c.IPTables.MasqueradeAll
	switch o.proxyMode.value {
	case "nftables":
		o.masqueradeAll, period = c.NFTables.MasqueradeAll, f.Given.NFTables.MinSyncPeriod.Duration
	case "ipvs":
		period = f.Given.IPVS.MinSyncPeriod.Duration
	}
	if !flags.Changed("min-sync-period") { // our own flag
		o.cluster.minSyncPeriod = period
	}
	o.conntrackUDP, o.conntrackUDPStream = c.Conntrack.UDPTimeout.Duration, c.Conntrack.UDPStreamTimeout.Duration
	o.oomScoreAdj = int(*c.OOMScoreAdj)
	if !flags.Changed("v") {
		o.node.Verbosity = int(min(c.Logging.Verbosity, 10))
	}
	if !flags.Changed("logging-format") && c.Logging.Format == "json" {
		o.logFormat.value = "json"
	}
	return nil
}

// completeKubeProxy derives defaults from kube-proxy's flags, and from whether there
// is a cluster.
func (o *runOptions) completeKubeProxy() error {
	if err := o.proxyMode.check(); err != nil {
		return fmt.Errorf("--proxy-mode: %w", err)
	}
	family6 := false
	if o.bindAddress != "" {
		a, err := netip.ParseAddr(o.bindAddress)
		if err != nil {
			return fmt.Errorf("--bind-address: %q is not an IP address", o.bindAddress)
		}
		a = a.Unmap()
		family6 = a.Is6()
		if !a.IsUnspecified() && len(o.nodeIPs) == 0 {
			o.nodeIPs = addresses{a}
		}
	}
	if err := between("oom-score-adj", o.oomScoreAdj, -1000, 1000); err != nil {
		return err
	}
	// kube-proxy's nftables mode has node ports on fewer addresses (A4.4, A4.5).
	o.noLocalhostNodePorts = !o.localhostNodePorts
	if o.proxyMode.value == "nftables" {
		o.noLocalhostNodePorts = true
		if len(o.nodePortAddresses) == 0 {
			o.nodePortAddresses = []string{"primary"}
		}
	}
	if o.manifests != "" {
		return nil // no port that was not asked for
	}
	anywhere, loopback := "0.0.0.0", "127.0.0.1"
	if family6 {
		anywhere, loopback = "::", "::1"
	}
	if o.node.HealthzAddress != "" || o.healthzPort != 0 {
		o.node.HealthzAddress = kubeproxyconfig.WithPort(o.node.HealthzAddress, anywhere, o.healthzPort)
	}
	if o.node.MetricsAddress != "" || o.metricsPort != 0 {
		o.node.MetricsAddress = kubeproxyconfig.WithPort(o.node.MetricsAddress, loopback, o.metricsPort)
	}
	return nil
}

// clusterRecordRate is the default of --access-log-rate for standard output in a
// cluster: 0.7 GB a day at most. The kubelet keeps 50 MiB, which is two hours of it.
const clusterRecordRate = 20

// recordRate returns the bound of records a second; 0 is none.
func (o *runOptions) recordRate() int {
	switch {
	case o.accessLogRate >= 0:
		return o.accessLogRate
	case o.manifests == "" && o.accessLog == "-":
		return clusterRecordRate
	}
	return 0
}

// adjustOOMScore applies --oom-score-adj, if the process may.
func (o *runOptions) adjustOOMScore(log zerolog.Logger) {
	if o.oomScoreAdj == 0 {
		return
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(o.oomScoreAdj)), 0); err != nil { //nolint:gosec // the file exists
		log.Debug().Err(err).Int("score", o.oomScoreAdj).Msg("--oom-score-adj has no effect")
	}
}

// proxyModeText is the answer of /proxyMode: the mode that the configuration names,
// for tools that know only kube-proxy's modes.
func (o *runOptions) proxyModeText() string { return cmp.Or(o.proxyMode.value, "iptables") }
