package main

import (
	"cmp"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/host/tracking"
)

// conntrackOptions are kube-proxy's flags of the kernel's connection tracking, on
// which hostPorts and masqueraded traffic depend.
type conntrackOptions struct {
	maxPerCore  int
	least       int
	established time.Duration
	closeWait   time.Duration
	beLiberal   bool

	settings tracking.Settings
}

func (o *conntrackOptions) register(f *pflag.FlagSet) {
	f.IntVar(&o.maxPerCore, "conntrack-max-per-core", 0, "set net.netfilter.nf_conntrack_max to this for each CPU; 0 leaves it (default: 32768 in a cluster or with --config, else as it is)")
	f.IntVar(&o.least, "conntrack-min", 0, "lower bound of nf_conntrack_max (default: 131072 where there is a maximum for each CPU)")
	f.DurationVar(&o.established, "conntrack-tcp-timeout-established", 0, "set net.netfilter.nf_conntrack_tcp_timeout_established; 0 leaves it (default: 24h in a cluster or with --config, else as it is)")
	f.DurationVar(&o.closeWait, "conntrack-tcp-timeout-close-wait", 0, "set net.netfilter.nf_conntrack_tcp_timeout_close_wait; 0 leaves it (default: 1h in a cluster or with --config, else as it is)")
	f.BoolVar(&o.beLiberal, "conntrack-tcp-be-liberal", false, "set net.netfilter.nf_conntrack_tcp_be_liberal to 1")
}

// validate checks the flags.
func (o *conntrackOptions) validate() error {
	return cmp.Or(
		between("conntrack-max-per-core", o.maxPerCore, 0, 1<<30),
		between("conntrack-min", o.least, 0, 1<<30),
		offOrSeconds("conntrack-tcp-timeout-established", o.established),
		offOrSeconds("conntrack-tcp-timeout-close-wait", o.closeWait),
	)
}

// takeConntrack decides what is set in the kernel: with a configuration file, and in a
// cluster, all that kube-proxy would set, else what the flags name, with kube-proxy's
// other half of a pair. Beside another proxy, these settings are that one's.
func (o *runOptions) takeConntrack(flags *pflag.FlagSet) {
	c := &o.conntrack
	c.settings = tracking.Settings{Established: c.established, CloseWait: c.closeWait, BeLiberal: c.beLiberal, UDP: o.conntrackUDP, UDPStream: o.conntrackUDPStream}
	usual := kubeproxyconfig.Default().Conntrack
	perCore, least := *usual.MaxPerCore, *usual.Min
	cluster := o.manifests == ""
	switch {
	case o.serviceProxyName != "":
		c.settings = tracking.Settings{}
		return
	case o.kubeProxy != nil:
		given := o.kubeProxy.Conntrack
		perCore, least = *given.MaxPerCore, *given.Min
		c.settings.Established, c.settings.CloseWait, c.settings.BeLiberal = given.TCPEstablishedTimeout.Duration, given.TCPCloseWaitTimeout.Duration, given.TCPBeLiberal
		c.settings.Max = tracking.MaxFor(int(perCore), int(least))
		return
	}
	if cluster && !flags.Changed("conntrack-tcp-timeout-established") {
		c.settings.Established = usual.TCPEstablishedTimeout.Duration
	}
	if cluster && !flags.Changed("conntrack-tcp-timeout-close-wait") {
		c.settings.CloseWait = usual.TCPCloseWaitTimeout.Duration
	}
	given := false
	if flags.Changed("conntrack-max-per-core") {
		perCore, given = int32(c.maxPerCore), true //nolint:gosec // within bounds
	}
	if flags.Changed("conntrack-min") {
		least, given = int32(c.least), true //nolint:gosec // within bounds
	}
	if given || cluster {
		c.settings.Max, c.settings.Raise = tracking.MaxFor(int(perCore), int(least)), !given
	}
}
