package main

import (
	"cmp"
	"errors"
	"fmt"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/hangup"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/stream"
)

// runOptions are the flags of sluice run. They have kube-proxy's names where
// kube-proxy has the same flag.
type runOptions struct {
	decisionOptions
	kubeProxyOptions
	cluster clusterOptions

	steering steeringOptions
	// What flags say of the data paths; limits completes their bounds.
	stream   stream.Config
	datagram datagram.Config
	relay    relay.Config
	balancer balancer.Options

	workers      int
	maxListeners int
	maxClaims    int
	maxFlows     int
	algorithm    choice
	dataPath     choice
	keepFlows    choice
	shortcuts    choice
	splice       choice

	accessLog       string
	accessLogFormat choice
	accessLogUDP    choice
	accessLogRate   int
	records         recordOptions
	logFormat       choice
	verbosity       int
	metricsAddress  string
	healthzAddress  string
	adminSocket     string
	web             runWebOptions
	history         bool

	metricsPerService bool
	version           versionFlag
	flags             *pflag.FlagSet // whose variables are these options
	given             [][2]string    // names and values of the flags that were given
}

// newRunOptions returns the options without any flag.
func newRunOptions() *runOptions {
	return &runOptions{
		steering:        newSteeringOptions(),
		balancer:        balancer.Options{Plan: balancer.DefaultPlan()},
		algorithm:       choice{value: balancer.RoundRobin.String(), allowed: balancer.Names()},
		keepFlows:       newChoice(pathAuto, "always", "never"),
		shortcuts:       newChoice("auto", "off"),
		dataPath:        choice{value: pathRelay, allowed: []string{pathAuto, pathKernel, pathRelay}},
		splice:          newChoice("auto", "off"),
		accessLogFormat: newChoice("json", "console"),
		accessLogUDP:    newChoice(string(datagram.LogAll), string(datagram.LogSampled), string(datagram.LogOff)),
		logFormat:       newChoice("text", "json"),
	}
}

func newRunCommand() *cobra.Command {
	o := newRunOptions()
	cmd := &cobra.Command{
		Use:   "run [--manifests DIR | --kubeconfig FILE | --config FILE]",
		Short: "Serve the Services of this node",
		Long: `Run accepts the connections that clients make to Services and relays them to
their endpoints, until it receives SIGINT or SIGTERM. It needs CAP_NET_ADMIN in
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
			p, err := newProxy(o, log)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return p.run(ctx, hangups)
		},
	}
	o.register(cmd)
	return cmd
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
	f.IntVar(&o.maxListeners, "max-listeners", 0, "limit of listening sockets; each service port has one for each address family, and above the limit some share them (default: 1/32 of the limit of open files, at most 8192)")
	f.IntVar(&o.maxClaims, "max-claims", 0, "limit of sockets that are bound to node ports, health check node ports, and addresses of Services on this node; each takes the descriptor of half a connection (default: half of what connections may have)")
	f.IntVar(&o.stream.Backlog, "listen-backlog", 4096, "connections of each service port that wait to be accepted (net.core.somaxconn caps it)")
	f.IntVar(&o.workers, "workers", 0, "event loops (default: one for each CPU)")
	f.IntVar(&o.stream.MaxConnections, "max-connections", 0, "limit of open connections; more wait to be accepted (default: what the limit of open files allows)")
	f.IntVar(&o.stream.MaxServiceConnections, "max-connections-per-service", 0, "limit of open connections of one Service, all its ports together; more are reset (default: 31/32 of --max-connections-per-namespace)")
	f.IntVar(&o.stream.MaxNamespaceConnections, "max-connections-per-namespace", 0, "limit of open connections of all Services of one namespace; more are reset (default: 31/32 of --max-connections)")
	f.IntVar(&o.stream.MaxServiceDialing, "max-dialing-per-service", 0, "limit of connections of one Service that wait for an endpoint to answer; more wait to be accepted (default: 1/8 of --max-connections, at most 1024)")
	f.IntVar(&o.balancer.MaxPins, "max-affinity-clients", balancer.DefaultMaxPins, "clients that session affinity remembers for each service port; above the limit it forgets the client that was quiet longest")
	f.IntVar(&o.datagram.MaxSessions, "max-udp-sessions", 0, "limit of UDP sessions; above it a new session evicts the oldest answered one of the Service with most sessions, in the namespace with most (default: 1/32 of the limit of open files, at most 65536)")
	f.IntVar(&o.datagram.MaxServiceSessions, "max-udp-sessions-per-service", 0, "limit of UDP sessions of one Service, all its ports together (default: --max-udp-sessions)")
	f.DurationVar(&o.datagram.Timeout, "udp-timeout", 30*time.Second, "end a UDP session after this time without a datagram")
	f.DurationVar(&o.datagram.StreamTimeout, "udp-stream-timeout", 2*time.Minute, "the same for a session that was used both ways for two seconds")
	f.Var(&o.algorithm, "balancer", "algorithm for Services without the annotation sluice.dev/balancer")
	f.Var((*durations)(&o.balancer.Plan.Timeouts), "dial-timeouts", "timeouts of the first, second, … attempt at an endpoint that does not answer")
	f.DurationVar(&o.stream.KeepAlive, "keepalive", 30*time.Second, "probe an idle side after this time, and give it up if it does not answer for twice the time; 0 disables probes")
	f.DurationVar(&o.relay.IdleTimeout, "idle-timeout", 24*time.Hour, "end a connection after this time without a byte; 0 means never")
	f.DurationVar(&o.relay.HalfClosedTimeout, "half-closed-timeout", time.Hour, "the same for a connection that one side has closed")
	f.StringVar(&o.stream.Congestion, "congestion-control", "", "TCP congestion control towards clients and endpoints, such as cubic (default: the system's)")
	f.Var(&o.dataPath, "datapath", "who moves the packets of clients that this node forwards: the relay, the kernel, or the kernel if a trial shows that it can")
	f.IntVar(&o.maxFlows, "max-flows", 65536, "limit of connections and UDP sessions that the kernel forwards; more are relayed")
	f.Var(&o.keepFlows, "keep-flows", "have connections that the kernel forwards go on when Sluice stops; auto does in a cluster")
	f.Var(&o.shortcuts, "shortcuts", "have packets of connections that the kernel forwards skip the node's IP stack where no other program looks at them")
	f.Var(&o.splice, "splice", "splice bulk through pipes instead of copying it")
	f.IntVar(&o.relay.MaxPipes, "max-pipes", 128, "limit of pipes for splicing, in all; above it bytes are copied")
	f.IntVar(&o.relay.MaxBulk, "max-bulk-buffers", 64, "limit of directions of connections with large socket buffers, 4 MiB each; those whose sender is 0.5 ms away or more count as two")
	f.IntVar(&o.stream.MaxMessage, "max-sctp-message", 65536, "largest SCTP message, in bytes; a larger one aborts its association. Sockets' buffers follow: each association may take eight times as much of the kernel's memory")
	f.IntVar(&o.stream.Streams, "sctp-streams", 64, "limit of streams of an SCTP association, each way, for Services without the annotation sluice.dev/sctp-streams; 1024 at most")
	f.StringVar(&o.accessLog, "access-log", "-", "destination of connection records: a file, - for standard output, or off")
	f.Var(&o.accessLogFormat, "access-log-format", "format of the records")
	f.IntVar(&o.accessLogRate, "access-log-rate", -1, "records a second that are written; beyond it only those with a failed attempt, up to ten times the rate; 0 writes all (default: 20 in a cluster on standard output, else 0)")
	f.Lookup("access-log-rate").DefValue = "0" // the help says what -1 means
	f.Var(&o.accessLogUDP, "access-log-udp", "which UDP sessions leave a record: all, off, or sampled: one in a hundred, and all with a failed attempt or that Sluice cut")
	o.records.register(f)
	f.StringVar(&o.metricsAddress, "metrics-bind-address", "", "address and port for Prometheus metrics (default: 127.0.0.1:10249 in a cluster, none with --manifests)")
	f.BoolVar(&o.metricsPerService, "metrics-per-service", true, "export metrics of each service port, some 60 series for a used one; if false, the same metrics are sums over all ports")
	f.StringVar(&o.healthzAddress, "healthz-bind-address", "", "address and port of the proxy's health, /healthz and /livez (default: 0.0.0.0:10256 in a cluster, none with --manifests)")
	f.StringVar(&o.adminSocket, "admin-socket", socket.Auto, "unix socket that sluice conns, tap and others ask: a path, @ and an abstract name, auto (a file in /run/sluice, else an abstract name), or off")
	f.BoolVar(&o.history, "history", false, "measure the rates of the last 15 minutes all the time, for the admin socket's /v1/history; if false, only while somebody asks for them")
	o.web.register(f)
	f.Var(&o.logFormat, "logging-format", "format of the log on standard error")
	f.IntVarP(&o.verbosity, "v", "v", 0, "verbosity of the log; 4 and more is for debugging")
	o.version.register(f)
}

// validate completes and checks the flags.
func (o *runOptions) validate() error {
	if o.manifests != "" && o.cluster.given() {
		return errors.New("--manifests and a cluster (--kubeconfig, --master, or a --config that names a kubeconfig) exclude each other: give one of them")
	}
	for _, validate := range []func() error{o.completeKubeProxy, o.cluster.validate, o.records.validate, o.web.validate, o.decisionOptions.validate, o.steering.validate} {
		if err := validate(); err != nil {
			return err
		}
	}
	if o.workers == 0 {
		o.workers = runtime.GOMAXPROCS(0)
	}
	return cmp.Or(
		between("max-listeners", o.maxListeners, 0, 60000),
		between("max-claims", o.maxClaims, 0, 1<<30),
		between("listen-backlog", o.stream.Backlog, 1, 1<<20),
		between("workers", o.workers, 1, 1024),
		between("max-connections", o.stream.MaxConnections, 0, 1<<30),
		between("max-connections-per-service", o.stream.MaxServiceConnections, 0, 1<<30),
		between("max-connections-per-namespace", o.stream.MaxNamespaceConnections, 0, 1<<30),
		between("max-dialing-per-service", o.stream.MaxServiceDialing, 0, 1<<30),
		between("max-affinity-clients", o.balancer.MaxPins, 1, 1<<24),
		between("max-udp-sessions", o.datagram.MaxSessions, 0, 1<<30),
		between("max-udp-sessions-per-service", o.datagram.MaxServiceSessions, 0, 1<<30),
		between("max-pipes", o.relay.MaxPipes, 1, 1<<20),
		between("max-flows", o.maxFlows, 1, flow.MostFlows),
		between("max-bulk-buffers", o.relay.MaxBulk, 1, 1<<20),
		between("max-sctp-message", o.stream.MaxMessage, 1024, 8<<20),
		between("sctp-streams", o.stream.Streams, 1, stream.MostStreams),
		between("v", o.verbosity, 0, 10),
		between("access-log-rate", o.accessLogRate, -1, 1<<30),
		offOrSeconds("keepalive", o.stream.KeepAlive),
		offOrSeconds("idle-timeout", o.relay.IdleTimeout),
		offOrSeconds("half-closed-timeout", o.relay.HalfClosedTimeout),
		between("udp-timeout", o.datagram.Timeout, time.Millisecond, 24*time.Hour),
		between("udp-stream-timeout", o.datagram.StreamTimeout, time.Millisecond, 24*time.Hour),
		validListenAddress("metrics-bind-address", o.metricsAddress),
		validListenAddress("healthz-bind-address", o.healthzAddress),
	)
}

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
