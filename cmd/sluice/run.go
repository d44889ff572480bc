package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/hangup"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/node"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/stream"
)

// runOptions are the flags of sluice run. They have kube-proxy's names where
// kube-proxy has the same flag.
type runOptions struct {
	decisionOptions
	kubeProxyOptions
	cluster clusterOptions

	steering steeringOptions
	// Many flags set fields of it; config completes the others.
	node node.Config

	algorithm choice
	dataPath  choice
	keepFlows choice
	shortcuts choice
	splice    choice

	accessLog       string
	accessLogFormat choice
	accessLogUDP    choice
	accessLogRate   int
	records         recordOptions
	logFormat       choice
	past            resource.QuantityValue
	web             runWebOptions
	dns             dnsOptions

	metricsPerService bool
	detach            bool
	version           versionFlag
	flags             *pflag.FlagSet // whose variables are these options
	given             [][2]string    // names and values of the flags that were given
}

// newDataPath returns the choice of --datapath.
func newDataPath() choice {
	return newChoice(string(node.AutoPath), string(node.KernelPath), string(node.RelayPath))
}

// newRunOptions returns the options without any flag.
func newRunOptions() *runOptions {
	return &runOptions{
		steering:        newSteeringOptions(),
		node:            node.Config{Version: version, Balancer: balancer.Options{Plan: balancer.DefaultPlan()}},
		algorithm:       choice{value: balancer.RoundRobin.String(), allowed: balancer.Names()},
		keepFlows:       newChoice("auto", "always", "never"),
		shortcuts:       newChoice("auto", "off"),
		dataPath:        newDataPath(),
		splice:          newChoice("auto", "off"),
		accessLogFormat: newChoice("json", "console"),
		accessLogUDP:    newChoice(string(datagram.LogAll), string(datagram.LogSampled), string(datagram.LogOff)),
		logFormat:       newChoice("text", "json"),
		past:            resource.QuantityValue{Quantity: resource.MustParse("16Mi")},
	}
}

func newRunCommand() *cobra.Command {
	o := newRunOptions()
	cmd := &cobra.Command{
		Use:   "run [--manifests DIR | --kubeconfig FILE | --config FILE]",
		Short: "Serve the Services of this node",
		Long: `Run has connections to Services reach their endpoints, until it receives SIGINT
or SIGTERM: the kernel forwards what it can, and Run relays the rest. It needs CAP_NET_ADMIN in
the network namespace that it serves. When it stops, it removes everything that
it created in the kernel (after a crash: sluice cleanup, or the next start).

Services come from a directory of manifests, or from a cluster's API server; in
a pod, the pod's service account is enough. Run accepts kube-proxy's flags and
configuration file, so that it can replace kube-proxy.

SIGHUP reopens the access log.`,
		Example: `  sluice run --manifests /etc/sluice/manifests --hostname-override node-1
  kubectl get services,endpointslices,nodes -A -o yaml > all/cluster.yaml; sluice run --manifests all`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.version.given {
				return writeVersion(cmd.OutOrStdout())
			}
			serves := detached()
			if o.detach && serves == nil {
				ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
				defer stop()
				return detach(ctx)
			}
			hangups := hangup.Notify()
			switch {
			case o.writeConfigTo != "":
				return kubeproxyconfig.Write(o.writeConfigTo, kubeproxyconfig.Default())
			case o.cleanup:
				return cleanUp(cmd, &o.steering)
			case o.initOnly:
				return nil
			}
			o.given = givenFlags(cmd.Flags())
			if err := o.readConfig(cmd.Flags()); err != nil {
				return err
			}
			if err := o.validate(); err != nil {
				return err
			}
			// Whoever reads the access log from standard output may go: that is
			// a write error, and no reason to end without cleaning up.
			signal.Ignore(syscall.SIGPIPE)
			o.flags = cmd.Flags()
			log, flush := newLogger(o)
			defer flush()
			o.logNotes(log)
			o.adjustOOMScore(log)
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return o.serve(ctx, log, hangups, serves)
		},
	}
	o.register(cmd)
	return cmd
}

// serve runs the proxy until ctx ends. serves is that of detached.
func (o *runOptions) serve(ctx context.Context, log zerolog.Logger, hangups <-chan os.Signal, serves *os.File) error {
	f := newFileFollower(o, log)
	config := o.config()
	config.Flags = func() map[string]string { return *f.flags.Load() }
	config.ProxyMode = func() string { return f.file.Load().proxyModeText() }
	config.PendingFields = f.pending.Load
	config.Notify = notifier(log, serves)
	var beside []func(context.Context) error
	if o.kubeProxy != nil {
		config.KubeProxy = func() any { return f.file.Load().kubeProxy }
		beside = append(beside, f.run)
	}
	p, err := node.New(config, log)
	if errors.Is(err, kubernetes.ErrNoCluster) {
		return errNothingToServe
	}
	if err != nil {
		return err
	}
	f.update = p.Update
	return p.Run(ctx, hangups, beside...)
}

// config returns what the flags say of the proxy.
func (o *runOptions) config() node.Config {
	c := o.node
	c.Source = o.source()
	c.Store, c.Policy, c.PodInterfaces = o.store(), o.policy(), o.podInterfaces()
	c.Steering, c.Instance, c.Tracking = o.steering.choose(o.nodeIPs), o.steering.instance(), o.conntrack.settings
	c.Balancer.Algorithm, _ = balancer.Parse(o.algorithm.value) // one of their names
	c.Datagram.Log = datagram.Logging(o.accessLogUDP.value)
	c.Relay.Splice = o.splice.value == "auto"
	c.DataPath = node.DataPath(o.dataPath.value)
	c.KeepFlows = o.keepFlows.value == "always" || o.keepFlows.value == "auto" && o.manifests == ""
	c.Shortcuts = o.shortcuts.value == "auto"
	c.AccessLog = conntrack.LogOptions{Path: o.accessLog, Console: o.accessLogFormat.value == "console", Keep: o.records.keep(), Rate: o.recordRate()}
	c.RecordOpens, c.RecordRefusals, c.RecordInterval, c.RecordTCP = o.records.opens, o.records.refusals, o.records.interval, o.records.tcp
	c.HardFail, c.Profiling = o.hardFail, o.profiling
	c.WholeMetrics = !o.metricsPerService
	c.PageAddress, c.PageHosts = o.web.address, o.web.hosts
	c.DNS = o.dns.config()
	return c
}

// addTo has another command accept all flags of sluice run but --version; its help
// lists some.
func (o *runOptions) addTo(cmd *cobra.Command, listed func(flag string) bool) {
	run := &cobra.Command{}
	o.register(run)
	cmd.Flags().SetNormalizeFunc(run.Flags().GetNormalizeFunc())
	run.Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "version" {
			flag.Hidden = !listed(flag.Name)
			cmd.Flags().AddFlag(flag)
		}
	})
}

func (o *runOptions) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	// kube-proxy's flags may be written with underscores, and --boot_id_file usually is.
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	o.decisionOptions.register(f)
	o.cluster.register(f)
	o.kubeProxyOptions.register(f)
	o.steering.register(f)
	f.IntVar(&o.node.MaxListeners, "max-listeners", 0, "limit of listening sockets, one for each service port and address family; above it some share them (default: 1/32 of the limit of open files, at most 8192)")
	f.IntVar(&o.node.MaxClaims, "max-claims", 0, "limit of sockets bound to node ports, health check node ports, and addresses of Services on this node (default: half of what connections may have)")
	f.IntVar(&o.node.Stream.Backlog, "listen-backlog", 4096, "connections of each service port that wait to be accepted (net.core.somaxconn caps it)")
	f.IntVar(&o.node.Workers, "workers", 0, "event loops (default: one for each CPU)")
	f.IntVar(&o.node.Stream.MaxConnections, "max-connections", 0, "limit of open connections; more wait to be accepted (default: what the limit of open files allows)")
	f.IntVar(&o.node.Stream.MaxServiceConnections, "max-connections-per-service", 0, "limit of open connections of one Service, all its ports together; more are reset (default: 31/32 of --max-connections-per-namespace)")
	f.IntVar(&o.node.Stream.MaxNamespaceConnections, "max-connections-per-namespace", 0, "limit of open connections of all Services of one namespace; more are reset (default: 31/32 of --max-connections)")
	f.IntVar(&o.node.Stream.MaxServiceDialing, "max-dialing-per-service", 0, "limit of connections of one Service that wait for an endpoint; more wait to be accepted (default: 1/8 of --max-connections, at most 1024)")
	f.IntVar(&o.node.Balancer.MaxPins, "max-affinity-clients", balancer.DefaultMaxPins, "clients that session affinity remembers for each service port")
	f.IntVar(&o.node.Datagram.MaxSessions, "max-udp-sessions", 0, "limit of UDP sessions; above it a new one evicts another (default: 1/32 of the limit of open files, at most 65536)")
	f.IntVar(&o.node.Datagram.MaxServiceSessions, "max-udp-sessions-per-service", 0, "limit of UDP sessions of one Service, all its ports together (default: --max-udp-sessions)")
	f.DurationVar(&o.node.Datagram.Timeout, "udp-timeout", 30*time.Second, "end a UDP session after this time without a datagram")
	f.DurationVar(&o.node.Datagram.StreamTimeout, "udp-stream-timeout", 2*time.Minute, "the same for a session that was used both ways for two seconds")
	f.BoolVar(&o.node.TakeOver, "take-over", false, "take over from a running sluice, if there is one; without it, a running sluice is an error")
	f.DurationVar(&o.node.TakeOverTimeout, "take-over-timeout", 5*time.Minute, "end open connections when this time has passed since another sluice took over")
	f.BoolVar(&o.detach, "detach", false, "start in the background, and return once that process serves, with status 1 if it ends before")
	f.Var(&o.algorithm, "balancer", "algorithm for Services without the annotation sluice.dev/balancer")
	f.Var((*durations)(&o.node.Balancer.Plan.Timeouts), "dial-timeouts", "timeouts of the first, second, … attempt at an endpoint that does not answer")
	f.DurationVar(&o.node.Stream.KeepAlive, "keepalive", 30*time.Second, "probe an idle side after this time, and give it up if it does not answer for twice the time; 0 disables probes")
	f.DurationVar(&o.node.Relay.IdleTimeout, "idle-timeout", 24*time.Hour, "end a connection after this time without a byte; 0 means never")
	f.DurationVar(&o.node.Relay.HalfClosedTimeout, "half-closed-timeout", time.Hour, "the same for a connection that one side has closed")
	f.StringVar(&o.node.Stream.Congestion, "congestion-control", "", "TCP congestion control towards clients and endpoints, such as cubic (default: the system's)")
	f.Var(&o.dataPath, "datapath", "who moves the packets of clients that this node forwards: the kernel if a trial shows that it can, the kernel, or the relay")
	f.IntVar(&o.node.MaxFlows, "max-flows", 0, "limit of connections and UDP sessions that the kernel forwards; more are relayed (default: 32768 for each CPU, 131072 at least, in 1/16 of the memory)")
	f.Var(&o.keepFlows, "keep-flows", "whether forwarded connections go on when Sluice stops; auto: in a cluster")
	f.Var(&o.shortcuts, "shortcuts", "whether forwarded packets skip the node's IP stack where no other program looks at them")
	f.Var(&o.splice, "splice", "splice bulk through pipes instead of copying it")
	f.IntVar(&o.node.Relay.MaxPipes, "max-pipes", 128, "limit of pipes for splicing; above it bytes are copied")
	f.IntVar(&o.node.Relay.MaxBulk, "max-bulk-buffers", 64, "limit of directions of connections with large socket buffers, 4 MiB each; those whose sender is 0.5 ms away or more count as two")
	f.IntVar(&o.node.Stream.MaxMessage, "max-sctp-message", 65536, "largest SCTP message, in bytes; a larger one aborts its association")
	f.IntVar(&o.node.Stream.Streams, "sctp-streams", 64, "limit of streams of an SCTP association, each way, for Services without the annotation sluice.dev/sctp-streams; 1024 at most")
	f.StringVar(&o.accessLog, "access-log", "-", "destination of connection records: a file, - for standard output, or off")
	f.Var(&o.accessLogFormat, "access-log-format", "format of the records")
	f.IntVar(&o.accessLogRate, "access-log-rate", -1, "most records written per second; above it, only records with a failed attempt, up to ten times as many; 0 writes all (default: 20 in a cluster on standard output, else 0)")
	f.Lookup("access-log-rate").DefValue = "0" // the help says what -1 means
	f.Var(&o.accessLogUDP, "access-log-udp", "which UDP sessions leave a record: all, off, or sampled: one in a hundred, and all with a failed attempt or that Sluice cut")
	o.records.register(f)
	f.StringVar(&o.node.MetricsAddress, "metrics-bind-address", "", "address and port for Prometheus metrics (default: 127.0.0.1:10249 in a cluster, none with --manifests)")
	f.BoolVar(&o.metricsPerService, "metrics-per-service", true, "metrics of each service port, some 60 series for a used one; if false, sums over all ports")
	f.StringVar(&o.node.HealthzAddress, "healthz-bind-address", "", "address and port of the proxy's health, /healthz and /livez (default: 0.0.0.0:10256 in a cluster, none with --manifests)")
	f.StringVar(&o.node.AdminSocket, "admin-socket", socket.Auto, "unix socket that sluice conns, tap and others ask: a path, @ and an abstract name, auto (a file in /run/sluice, else an abstract name), or off")
	f.BoolVar(&o.node.History, "history", false, "measure the rates of the last 15 minutes all the time, not only while somebody asks")
	f.Var(&o.past, "past", "memory for the records of connections that ended, some 8,000 records each MiB; 0 keeps none")
	o.web.register(f)
	o.dns.register(f)
	f.Var(&o.logFormat, "logging-format", "format of the log on standard error")
	f.IntVarP(&o.node.Verbosity, "v", "v", 0, "verbosity of the log; 4 and more is for debugging")
	o.version.register(f)
}

// validate completes and checks the flags.
func (o *runOptions) validate() error {
	if o.manifests != "" && o.cluster.given() {
		return errors.New("--manifests and a cluster (--kubeconfig, --master, or a --config that names a kubeconfig) exclude each other: give one of them")
	}
	for _, validate := range []func() error{
		o.completeKubeProxy, o.cluster.validate, o.records.validate, o.web.validate, o.dns.validate, o.decisionOptions.validate, o.steering.validate,
	} {
		if err := validate(); err != nil {
			return err
		}
	}
	if o.node.Workers == 0 {
		o.node.Workers = runtime.GOMAXPROCS(0)
	}
	if o.node.Past = int(o.past.Value()); o.node.Past != 0 && (o.node.Past < conntrack.LeastPast || o.node.Past > mostPast) {
		return fmt.Errorf("--past: %s is neither 0 nor from 1Mi to 4Gi", o.past.String())
	}
	return cmp.Or(
		between("max-listeners", o.node.MaxListeners, 0, 60000),
		between("max-claims", o.node.MaxClaims, 0, 1<<30),
		between("listen-backlog", o.node.Stream.Backlog, 1, 1<<20),
		between("workers", o.node.Workers, 1, 1024),
		between("max-connections", o.node.Stream.MaxConnections, 0, 1<<30),
		between("max-connections-per-service", o.node.Stream.MaxServiceConnections, 0, 1<<30),
		between("max-connections-per-namespace", o.node.Stream.MaxNamespaceConnections, 0, 1<<30),
		between("max-dialing-per-service", o.node.Stream.MaxServiceDialing, 0, 1<<30),
		between("max-affinity-clients", o.node.Balancer.MaxPins, 1, 1<<24),
		between("max-udp-sessions", o.node.Datagram.MaxSessions, 0, 1<<30),
		between("max-udp-sessions-per-service", o.node.Datagram.MaxServiceSessions, 0, 1<<30),
		between("max-pipes", o.node.Relay.MaxPipes, 1, 1<<20),
		between("max-flows", o.node.MaxFlows, 0, bpf.MostFlows),
		between("max-bulk-buffers", o.node.Relay.MaxBulk, 1, 1<<20),
		between("max-sctp-message", o.node.Stream.MaxMessage, 1024, 8<<20),
		between("sctp-streams", o.node.Stream.Streams, 1, stream.MostStreams),
		between("v", o.node.Verbosity, 0, 10),
		between("access-log-rate", o.accessLogRate, -1, 1<<30),
		between("take-over-timeout", o.node.TakeOverTimeout, 0, 7*24*time.Hour),
		offOrSeconds("keepalive", o.node.Stream.KeepAlive),
		offOrSeconds("idle-timeout", o.node.Relay.IdleTimeout),
		offOrSeconds("half-closed-timeout", o.node.Relay.HalfClosedTimeout),
		between("udp-timeout", o.node.Datagram.Timeout, time.Millisecond, 24*time.Hour),
		between("udp-stream-timeout", o.node.Datagram.StreamTimeout, time.Millisecond, 24*time.Hour),
		validListenAddress("metrics-bind-address", o.node.MetricsAddress),
		validListenAddress("healthz-bind-address", o.node.HealthzAddress),
	)
}

// mostPast is the largest --past, in bytes.
const mostPast = 4 << 30

// values returns the options in force by their flags' names.
func (o *runOptions) values() map[string]string {
	values := make(map[string]string)
	o.flags.VisitAll(func(flag *pflag.Flag) { values[flag.Name] = flag.Value.String() })
	return values
}

// validListenAddress checks the address and port of a server; empty means none, and no
// address before the port means all of this node's.
func validListenAddress(flag, s string) error {
	if s == "" {
		return nil
	}
	if strings.HasPrefix(s, ":") {
		s = "0.0.0.0" + s
	}
	if err := kubeproxyconfig.CheckListenAddress(s); err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return nil
}
