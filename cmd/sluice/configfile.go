package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/node"
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

// configLook is the time between two looks at the configuration file, for changes of
// which no event tells: those of what a symlink leads to, or where the system has no
// inotify instances left.
const configLook = 10 * time.Second

// fileFollower follows the configuration file, and puts into force what can change. Its
// run owns the options after the start.
type fileFollower struct {
	options *runOptions
	log     zerolog.Logger
	update  func(context.Context, node.Update) error

	file    atomic.Pointer[runOptions]        // those of the file's last content that was usable
	flags   atomic.Pointer[map[string]string] // the options in force, by the flags' names
	pending atomic.Int64                      // fields that a restart would put into force
}

func newFileFollower(o *runOptions, log zerolog.Logger) *fileFollower {
	f := &fileFollower{options: o, log: log}
	f.file.Store(o)
	f.takeFlags()
	return f
}

// run follows the file until ctx ends. It returns an error only where a change is to end
// the program.
func (f *fileFollower) run(ctx context.Context) error {
	looks := time.NewTicker(configLook)
	defer looks.Stop()
	w := fileWatch{path: f.options.configFile, content: f.options.configText, looks: looks.C, log: f.log}
	return w.run(ctx, func() error {
		if f.options.onConfigChange.value == configExit {
			return fmt.Errorf("%s has changed; restart to use it", f.options.configFile)
		}
		next, err := f.options.reread()
		if err != nil {
			f.log.Error().Err(err).Msg("the changed configuration file cannot be used; everything stays as it was")
			return nil
		}
		f.take(ctx, next)
		return nil
	})
}

// fileWatch follows the content of a file.
type fileWatch struct {
	path    string
	content []byte           // as it is known; it may be another one already
	looks   <-chan time.Time // when to look without an event
	log     zerolog.Logger
}

// run calls changed whenever the content of the file is another one, until ctx ends or
// changed returns an error.
func (w *fileWatch) run(ctx context.Context, changed func() error) error {
	var events <-chan fsnotify.Event // none, where there is no watcher
	var faults <-chan error
	if watcher, err := w.open(); err == nil {
		defer func() { _ = watcher.Close() }()
		events, faults = watcher.Events, watcher.Errors
	} else {
		w.log.Warn().Err(err).Str("file", w.path).Msgf("the system gives no events for the configuration file: looking at it every %s (see fs.inotify.max_user_instances and max_user_watches)", configLook)
	}
	for { // at once, for a change since it was read
		now, err := os.ReadFile(w.path) //nolint:gosec // the file that the flag names
		// A file that is gone or cannot be read is no new configuration.
		if err == nil && !bytes.Equal(now, w.content) {
			w.content = now
			if err := changed(); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-faults: // events may be lost, so look
			if !open {
				faults = nil
			}
		case _, open := <-events:
			if !open {
				events = nil
			}
		case <-w.looks:
		}
	}
}

// open watches the file's directory: a ConfigMap's files are symlinks through a
// directory that is replaced as a whole.
func (w *fileWatch) open() (*fsnotify.Watcher, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	if err := watcher.Add(filepath.Dir(w.path)); err != nil {
		_ = watcher.Close()
		return nil, err
	}
	return watcher, nil
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

// take puts into force what can be changed without a restart, and logs the rest.
func (f *fileFollower) take(ctx context.Context, next *runOptions) {
	o, last := f.options, f.file.Load()
	applied, _ := sortFields(kubeproxyconfig.Changed(last.kubeProxy, next.kubeProxy), o, next)
	_, pending := sortFields(kubeproxyconfig.Changed(o.kubeProxy, next.kubeProxy), o, next)
	f.file.Store(next)
	f.pending.Store(int64(len(pending)))

	o.clusterCIDRs, o.nodePortAddresses, o.noLocalhostNodePorts, o.masqueradeAll = next.clusterCIDRs, next.nodePortAddresses, next.noLocalhostNodePorts, next.masqueradeAll
	o.proxyMode.value = next.proxyMode.value
	if detectsAtOnce(o, next) {
		o.detectLocal.value = next.detectLocal.value
	}
	if o.oomScoreAdj != next.oomScoreAdj {
		o.oomScoreAdj = next.oomScoreAdj
		o.adjustOOMScore(f.log)
	}
	o.node.Verbosity = next.node.Verbosity
	o.conntrack.settings = next.conntrack.settings
	o.cluster.minSyncPeriod = next.cluster.minSyncPeriod
	if err := f.update(ctx, node.Update{Policy: o.policy(), Tracking: o.conntrack.settings, MinSyncPeriod: o.cluster.minSyncPeriod, Verbosity: o.node.Verbosity}); err != nil {
		return // the proxy stops
	}
	f.takeFlags()

	for _, note := range next.notes {
		if !slices.Contains(last.notes, note) {
			f.log.Warn().Str("file", o.configFile).Msg(note)
		}
	}
	f.log.Info().Str("file", o.configFile).Strs("fields", applied).Msg("the configuration file has changed; these fields are in force")
	if len(pending) > 0 {
		f.log.Warn().Str("file", o.configFile).Strs("fields", pending).Msg("these fields of the configuration file come into force with a restart")
	}
}

// takeFlags shows the options in force at /flagz.
func (f *fileFollower) takeFlags() {
	values := f.options.values()
	f.flags.Store(&values)
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
