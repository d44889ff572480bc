package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
)

// The values of --on-config-change.
const (
	configApply = "apply"
	configExit  = "exit"
)

// appliedAtOnce are the fields of kube-proxy's configuration file whose changes come
// into force without a restart; all below one of them do too. A ConfigMap that changes
// would otherwise end the proxies of all nodes at the same moment, and their
// connections with them.
var appliedAtOnce = []string{
	"clusterCIDR", "nodePortAddresses", "mode", "iptables.masqueradeAll", "iptables.localhostNodePorts", "nftables.masqueradeAll",
	"iptables.minSyncPeriod", "nftables.minSyncPeriod", "ipvs.minSyncPeriod", "oomScoreAdj", "logging.verbosity",
	"conntrack.maxPerCore", "conntrack.min", "conntrack.tcpEstablishedTimeout", "conntrack.tcpCloseWaitTimeout", "conntrack.tcpBeLiberal",
}

// followConfig follows the configuration file until ctx ends. It returns an error only
// where a change is to end the program.
func (p *proxy) followConfig(ctx context.Context) error {
	return watchFile(ctx, p.options.configFile, func() error {
		if p.options.onConfigChange.value == configExit {
			return fmt.Errorf("%s has changed; restart to use it", p.options.configFile)
		}
		next, err := p.options.reread()
		if err != nil {
			p.log.Error().Err(err).Msg("the changed configuration file cannot be used; everything stays as it was")
			return nil
		}
		sendTo(ctx, p.requests, func() { p.takeConfig(next) })
		return nil
	})
}

// watchFile calls changed whenever the content of a file is another one, until ctx
// ends or changed returns an error.
func watchFile(ctx context.Context, path string, changed func() error) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching %s: %w", path, err)
	}
	defer func() { _ = watcher.Close() }()
	// A ConfigMap's files are symlinks through a directory that is replaced as a
	// whole, so watch the directory and compare the content.
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		return fmt.Errorf("watching %s: %w", path, err)
	}
	content, err := os.ReadFile(path) //nolint:gosec // the file that the flag names
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-watcher.Errors: // events may be lost, so look
			if !open {
				return nil
			}
		case <-watcher.Events:
		}
		now, err := os.ReadFile(path) //nolint:gosec // as above
		if err != nil || slices.Equal(now, content) {
			continue // a file that is gone or cannot be read is no new configuration
		}
		content = now
		if err := changed(); err != nil {
			return err
		}
	}
}

// givenFlags returns the flags that were given, in a form that Set takes; a flag with
// several values has an entry for each.
func givenFlags(flags *pflag.FlagSet) (given [][2]string) {
	flags.Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(interface{ GetSlice() []string }); ok {
			values = list.GetSlice()
			if len(values) == 0 {
				values = []string{""}
			}
		}
		for _, value := range values {
			given = append(given, [2]string{f.Name, value})
		}
	})
	return given
}

// reread returns the options that the program would have if it began now: those of the
// same flags and of the file's content.
func (o *runOptions) reread() (*runOptions, error) {
	next := newRunOptions()
	cmd := &cobra.Command{Use: "run"}
	next.register(cmd)
	for _, f := range o.given {
		if err := cmd.Flags().Set(f[0], f[1]); err != nil {
			return nil, fmt.Errorf("--%s: %w", f[0], err)
		}
	}
	if err := next.readConfig(cmd.Flags()); err != nil {
		return nil, err
	}
	return next, next.validate()
}

// takeConfig puts into force what can be changed without a restart, and logs the rest.
// It runs on run's goroutine.
func (p *proxy) takeConfig(next *runOptions) {
	o, last := p.options, p.file.Load()
	applied, _ := sortFields(kubeproxyconfig.Changed(last.kubeProxy, next.kubeProxy), o, next)
	_, pending := sortFields(kubeproxyconfig.Changed(o.kubeProxy, next.kubeProxy), o, next)
	p.file.Store(next)
	p.restartFields.Store(int64(len(pending)))

	o.clusterCIDRs, o.nodePortAddresses, o.noLocalhostNodePorts, o.masqueradeAll = next.clusterCIDRs, next.nodePortAddresses, next.noLocalhostNodePorts, next.masqueradeAll
	o.proxyMode.value = next.proxyMode.value
	if detectsAtOnce(o, next) {
		o.detectLocal.value = next.detectLocal.value
		p.node.podCIDRs = next.detectLocal.value == detectNodeCIDR
	}
	if o.verbosity != next.verbosity {
		o.verbosity = next.verbosity
		p.verbosity.setUsual(next.verbosity)
	}
	if o.oomScoreAdj != next.oomScoreAdj {
		o.oomScoreAdj = next.oomScoreAdj
		o.adjustOOMScore(p.log)
	}
	if o.conntrack.settings != next.conntrack.settings {
		o.conntrack.settings = next.conntrack.settings
		p.setConntrack()
	}
	if p.cluster != nil && o.cluster.minSyncPeriod != next.cluster.minSyncPeriod {
		o.cluster.minSyncPeriod = next.cluster.minSyncPeriod
		p.cluster.SetMinSyncPeriod(o.cluster.minSyncPeriod)
	}
	p.hostChanged(*p.host.Load()) // compiles the policy with the new options
	p.takeFlags()

	for _, note := range next.notes {
		if !slices.Contains(last.notes, note) {
			p.log.Warn().Str("file", o.configFile).Msg(note)
		}
	}
	p.log.Info().Str("file", o.configFile).Strs("fields", applied).Msg("the configuration file has changed; these fields are in force")
	if len(pending) > 0 {
		p.log.Warn().Str("file", o.configFile).Strs("fields", pending).Msg("these fields of the configuration file come into force with a restart")
	}
}

// takeFlags shows the options in force at /flagz.
func (p *proxy) takeFlags() {
	values := p.options.values()
	p.flags.Store(&values)
}

// sortFields splits changed fields into those that are applied at once and those that
// need a restart.
func sortFields(changed []string, o, next *runOptions) (atOnce, restart []string) {
	for _, field := range changed {
		if slices.Contains(appliedAtOnce, field) || field == "detectLocalMode" && detectsAtOnce(o, next) {
			atOnce = append(atOnce, field)
		} else {
			restart = append(restart, field)
		}
	}
	return atOnce, restart
}

// detectsAtOnce reports whether the way in which local pods are recognised can change
// without a restart: the watcher of the node's interfaces is opened for one set of
// them.
func detectsAtOnce(o, next *runOptions) bool {
	return o.podInterfaces() == nil && next.podInterfaces() == nil
}
