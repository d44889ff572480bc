package node

import (
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/stream"
)

// Config says what a Proxy serves, and how. The flags of sluice run set its fields;
// docs/configuration.md has their defaults.
type Config struct {
	Version string // of the program, for the log, metrics and the API server
	Source  Source
	Store   service.StoreOptions
	// Policy has all but what the node's network stack and its operator add: NodeAddresses,
	// PodRanges and Drained.
	Policy policy.Config
	// PodInterfaces says which interfaces are of pods, by name; nil if pods are not
	// recognised by interfaces.
	PodInterfaces func(name string) bool

	Steering choose.Options
	Instance string            // distinguishes this proxy from others in the network namespace; usually empty
	Tracking tracking.Settings // of the kernel's connection tracking

	TakeOver        bool          // from a running proxy with the same names, if there is one
	TakeOverTimeout time.Duration // how long open connections go on after another process took over

	Workers      int // event loops; 1 at least
	MaxListeners int // listening sockets; 0: by the limit of open files
	MaxClaims    int // sockets that are bound to node ports and Services' addresses; 0 likewise
	// Stream and Datagram have 0 where limits follow from the limit of open files.
	Stream   stream.Config
	Datagram datagram.Config
	Relay    relay.Config
	Balancer balancer.Options // defaults of Services

	DataPath  DataPath // empty: RelayPath
	MaxFlows  int      // connections and sessions that the kernel forwards; 0: by the machine
	KeepFlows bool     // they go on when the process ends
	Shortcuts bool     // their packets skip the node's IP stack where nobody looks at them

	AccessLog      conntrack.LogOptions // Path Off: none; the Logger is the Proxy's
	RecordOpens    bool                 // also write a record of each connection that opens
	RecordRefusals bool                 // also write records of what is refused or dropped
	RecordInterval time.Duration        // also write records of open connections; 0: none
	RecordTCP      bool                 // records say what TCP says of both sides
	Verbosity      int                  // of the program's log, which the caller has set

	HealthzAddress string // of /healthz and /livez; empty: none
	MetricsAddress string // empty: none
	WholeMetrics   bool   // sums over all service ports in place of metrics of each
	Profiling      bool   // /debug/pprof beside the metrics
	HardFail       bool   // a port of these that is taken ends the Proxy

	AdminSocket string // a path, @ and an abstract name, socket.Auto, or Off
	History     bool   // measure the rates of the last 15 minutes all the time
	Past        int    // bytes for the records of connections that ended; 0: none are kept
	DNS         DNS
	PageAddress string   // of the page; empty: none
	PageHosts   []string // names by which browsers may ask for it

	// Applied is called when a configuration is completely in force, by Run's goroutine; nil: nobody.
	Applied func(*service.Snapshot)

	// Notify tells a service manager what becomes of this process, in the words of sd_notify(3), and
	// reports whether there is one; nil: there is none.
	Notify func(state string) bool

	ProxyMode     func() string            // the answer of /proxyMode; needed with MetricsAddress
	Flags         func() map[string]string // the answer of /flagz
	KubeProxy     func() any               // the answer of /configz; nil: none
	PendingFields func() int64             // fields of a configuration file that need a restart; nil: none

	beforeFlows func() error // tests: what the start of kernel flows waits for, or fails by
}

// Off disables the access log or the admin socket, in place of its path.
const Off = "off"

// DataPath is who moves the packets of clients that this node forwards.
type DataPath string

// The data paths.
const (
	AutoPath   DataPath = "auto" // the kernel if a trial shows that it can
	KernelPath DataPath = "kernel"
	RelayPath  DataPath = "relay"
)

// Update is what can change without a restart.
type Update struct {
	Policy        policy.Config // as in Config
	Tracking      tracking.Settings
	MinSyncPeriod time.Duration
	Verbosity     int
}
