package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/kubeproxyconfig"
)

// runOptions are the flags of sluice run. They have kube-proxy's names where
// kube-proxy has the same flag.
type runOptions struct {
	decisionOptions
	kubeProxyOptions
	cluster clusterOptions

	steering      steeringOptions
	maxListeners  int
	maxClaims     int
	listenBacklog int

	workers                 int
	maxConnections          int
	maxServiceConnections   int
	maxNamespaceConnections int
	maxServiceDialing       int
	maxAffinityClients      int

	maxSessions        int
	maxServiceSessions int
	udpTimeout         time.Duration
	udpStreamTimeout   time.Duration

	balancer          choice
	dialTimeouts      durations
	keepAlive         time.Duration
	idleTimeout       time.Duration
	halfClosedTimeout time.Duration
	congestion        string
	splice            choice
	maxPipes          int
	maxBulk           int

	accessLog       string
	accessLogFormat choice
	accessLogUDP    choice
	logFormat       choice
	verbosity       int
	metricsAddress  string
	healthzAddress  string

	metricsPerService bool
	values            map[string]string // of all flags, for /flagz
}

// newRunOptions returns the options without any flag.
func newRunOptions() *runOptions {
	return &runOptions{
		steering:        newSteeringOptions(),
		balancer:        choice{value: balancer.RoundRobin.String(), allowed: balancer.Names()},
		splice:          choice{value: "auto", allowed: []string{"auto", "off"}},
		accessLogFormat: choice{value: "json", allowed: []string{"json", "console"}},
		accessLogUDP:    choice{value: "all", allowed: []string{"all", "sampled", "off"}},
		logFormat:       choice{value: "text", allowed: []string{"text", "json"}},
		dialTimeouts:    slices.Clone(balancer.DefaultPlan().Timeouts),
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
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP) // first of all: it ends a program that does not
			switch {
			case o.writeConfigTo != "":
				return kubeproxyconfig.Write(o.writeConfigTo, kubeproxyconfig.Default())
			case o.cleanup:
				return cleanUp(cmd, &o.steering)
			case o.initOnly:
				return nil
			}
			if err := o.readConfig(cmd.Flags()); err != nil {
				return err
			}
			if err := o.validate(); err != nil {
				return err
			}
			// Whoever reads the access log from standard output may go: that is
			// a write error, and no reason to end without cleaning up.
			signal.Ignore(syscall.SIGPIPE)
			o.values = flagValues(cmd.Flags())
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

func (o *runOptions) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	o.decisionOptions.register(f)
	o.cluster.register(f)
	o.kubeProxyOptions.register(f)
	o.steering.register(f)
	f.IntVar(&o.maxListeners, "max-listeners", 0, "limit of listening sockets; each service port has one for each address family, and above the limit some share them (default: 1/32 of the limit of open files, at most 8192)")
	f.IntVar(&o.maxClaims, "max-claims", 0, "limit of sockets that are bound to node ports, health check node ports, and addresses of Services on this node; each takes the descriptor of half a connection (default: half of what connections may have)")
	f.IntVar(&o.listenBacklog, "listen-backlog", 4096, "connections of each service port that wait to be accepted (net.core.somaxconn caps it)")
	f.IntVar(&o.workers, "workers", 0, "event loops (default: one for each CPU)")
	f.IntVar(&o.maxConnections, "max-connections", 0, "limit of open connections; more wait to be accepted (default: what the limit of open files allows)")
	f.IntVar(&o.maxServiceConnections, "max-connections-per-service", 0, "limit of open connections of one Service, all its ports together; more are reset (default: 31/32 of --max-connections)")
	f.IntVar(&o.maxNamespaceConnections, "max-connections-per-namespace", 0, "limit of open connections of all Services of one namespace; more are reset (default: 31/32 of --max-connections)")
	f.IntVar(&o.maxServiceDialing, "max-dialing-per-service", 0, "limit of connections of one Service that wait for an endpoint to answer; more wait to be accepted (default: 1/8 of --max-connections, at most 1024)")
	f.IntVar(&o.maxAffinityClients, "max-affinity-clients", balancer.DefaultMaxPins, "clients that session affinity remembers for each service port; above the limit it forgets the client that was quiet longest")
	f.IntVar(&o.maxSessions, "max-udp-sessions", 0, "limit of UDP sessions; above it a new session evicts the oldest answered one of the Service with most sessions, in the namespace with most (default: 1/32 of the limit of open files, at most 65536)")
	f.IntVar(&o.maxServiceSessions, "max-udp-sessions-per-service", 0, "limit of UDP sessions of one Service, all its ports together (default: --max-udp-sessions)")
	f.DurationVar(&o.udpTimeout, "udp-timeout", 30*time.Second, "end a UDP session after this time without a datagram")
	f.DurationVar(&o.udpStreamTimeout, "udp-stream-timeout", 2*time.Minute, "the same for a session that was used both ways for two seconds")
	f.Var(&o.balancer, "balancer", "algorithm for Services without the annotation sluice.dev/balancer")
	f.Var(&o.dialTimeouts, "dial-timeouts", "timeouts of the first, second, … attempt at an endpoint that does not answer")
	f.DurationVar(&o.keepAlive, "keepalive", 30*time.Second, "probe an idle side after this time, and give it up if it does not answer for twice the time; 0 disables probes")
	f.DurationVar(&o.idleTimeout, "idle-timeout", 24*time.Hour, "end a connection after this time without a byte; 0 means never")
	f.DurationVar(&o.halfClosedTimeout, "half-closed-timeout", time.Hour, "the same for a connection that one side has closed")
	f.StringVar(&o.congestion, "congestion-control", "", "TCP congestion control towards clients and endpoints, such as cubic (default: the system's)")
	f.Var(&o.splice, "splice", "splice bulk through pipes instead of copying it")
	f.IntVar(&o.maxPipes, "max-pipes", 128, "limit of pipes for splicing, in all; above it bytes are copied")
	f.IntVar(&o.maxBulk, "max-bulk-buffers", 64, "limit of directions of connections with large socket buffers, 4 MiB each; those whose sender is 0.5 ms away or more count as two")
	f.StringVar(&o.accessLog, "access-log", "-", "destination of connection records: a file, - for standard output, or off")
	f.Var(&o.accessLogFormat, "access-log-format", "format of the records")
	f.Var(&o.accessLogUDP, "access-log-udp", "which UDP sessions leave a record: all, off, or sampled: one in a hundred, and all with a failed attempt or that Sluice cut")
	f.StringVar(&o.metricsAddress, "metrics-bind-address", "", "address and port for Prometheus metrics (default: 127.0.0.1:10249 in a cluster, none with --manifests)")
	f.BoolVar(&o.metricsPerService, "metrics-per-service", true, "export metrics of each service port, some 60 series for a used one; if false, the same metrics are sums over all ports")
	f.StringVar(&o.healthzAddress, "healthz-bind-address", "", "address and port of the proxy's health, /healthz and /livez (default: 0.0.0.0:10256 in a cluster, none with --manifests)")
	f.Var(&o.logFormat, "logging-format", "format of the log on standard error")
	f.IntVarP(&o.verbosity, "v", "v", 0, "verbosity of the log; 4 and more is for debugging")
}

// validate completes and checks the flags.
func (o *runOptions) validate() error {
	if o.manifests != "" && o.cluster.given() {
		return errors.New("--manifests and a cluster (--kubeconfig, --master, or a --config that names a kubeconfig) exclude each other: give one of them")
	}
	if err := o.completeKubeProxy(); err != nil {
		return err
	}
	if err := o.cluster.validate(); err != nil {
		return err
	}
	if err := o.decisionOptions.validate(); err != nil {
		return err
	}
	if err := o.steering.validate(); err != nil {
		return err
	}
	if o.workers == 0 {
		o.workers = runtime.GOMAXPROCS(0)
	}
	for _, check := range []struct {
		flag       string
		value      int64
		least, top int64
	}{
		{"max-listeners", int64(o.maxListeners), 0, 60000},
		{"max-claims", int64(o.maxClaims), 0, 1 << 30},
		{"listen-backlog", int64(o.listenBacklog), 1, 1 << 20},
		{"workers", int64(o.workers), 1, 1024},
		{"max-connections", int64(o.maxConnections), 0, 1 << 30},
		{"max-connections-per-service", int64(o.maxServiceConnections), 0, 1 << 30},
		{"max-connections-per-namespace", int64(o.maxNamespaceConnections), 0, 1 << 30},
		{"max-dialing-per-service", int64(o.maxServiceDialing), 0, 1 << 30},
		{"max-affinity-clients", int64(o.maxAffinityClients), 1, 1 << 24},
		{"max-udp-sessions", int64(o.maxSessions), 0, 1 << 30},
		{"max-udp-sessions-per-service", int64(o.maxServiceSessions), 0, 1 << 30},
		{"max-pipes", int64(o.maxPipes), 1, 1 << 20},
		{"max-bulk-buffers", int64(o.maxBulk), 1, 1 << 20},
		{"v", int64(o.verbosity), 0, 10},
	} {
		if check.value < check.least || check.value > check.top {
			return fmt.Errorf("--%s: %d is not between %d and %d", check.flag, check.value, check.least, check.top)
		}
	}
	for _, check := range []struct {
		flag  string
		value time.Duration
	}{
		{"keepalive", o.keepAlive},
		{"idle-timeout", o.idleTimeout},
		{"half-closed-timeout", o.halfClosedTimeout},
	} {
		if check.value < 0 || check.value > 0 && check.value < time.Second {
			return fmt.Errorf("--%s: %s is shorter than a second; 0 switches it off", check.flag, check.value)
		}
	}
	for _, check := range []struct {
		flag  string
		value time.Duration
	}{
		{"udp-timeout", o.udpTimeout},
		{"udp-stream-timeout", o.udpStreamTimeout},
	} {
		if check.value < time.Millisecond || check.value > 24*time.Hour {
			return fmt.Errorf("--%s: %s is not between 1ms and 24h", check.flag, check.value)
		}
	}
	for _, check := range []struct{ flag, value string }{
		{"metrics-bind-address", o.metricsAddress},
		{"healthz-bind-address", o.healthzAddress},
	} {
		if check.value == "" {
			continue
		}
		if err := validListenAddress(check.value); err != nil {
			return fmt.Errorf("--%s: %w", check.flag, err)
		}
	}
	return nil
}

// flagValues returns the flags by their names, as they were given.
func flagValues(f *pflag.FlagSet) map[string]string {
	values := make(map[string]string)
	f.VisitAll(func(flag *pflag.Flag) { values[flag.Name] = flag.Value.String() })
	return values
}

func validListenAddress(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%q is not an address and a port such as 127.0.0.1:10249 or [::1]:10249", s)
	}
	if host != "" {
		if _, err := netip.ParseAddr(host); err != nil {
			return fmt.Errorf("%q: %s is not an IP address", s, host)
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%q: port %s is not between 1 and 65535", s, port)
	}
	return nil
}
