// Package api has the JSON types and the paths of the admin socket. docs/admin-api.md
// describes them. It only holds data, and says it in words.
//
// The version is part of each path. Within a version, fields may be added; programs
// must ignore those that they do not know.
package api

import "time"

// Paths of version 1. All are GET but those of actions, which are POST.
const (
	PathVersion      = "/v1/version"
	PathConnections  = "/v1/connections"        // one page
	PathConnection   = "/v1/connections/{id}"   // one that is open, or ended a while ago
	PathStream       = "/v1/connections/stream" // all, as lines
	PathTap          = "/v1/tap"                // records as connections end, as lines
	PathPast         = "/v1/past"               // records of connections that ended, as lines
	PathServices     = "/v1/services"
	PathRates        = "/v1/rates" // a frame each interval, as lines
	PathHistory      = "/v1/history"
	PathFailures     = "/v1/failures"
	PathStatus       = "/v1/status"
	PathConfig       = "/v1/config"
	PathExplain      = "/v1/explain"
	PathComplete     = "/v1/complete"
	PathDestinations = "/v1/destinations"
	PathClose        = "/v1/close"     // POST
	PathDrain        = "/v1/drain"     // GET lists, POST changes
	PathVerbosity    = "/v1/verbosity" // POST
)

// ReadOnly is the header of a request that may only read, whoever sends it: a page that
// is forwarded to the admin socket has readers with less rights than its server.
const ReadOnly = "Sluice-Read-Only"

// Bounds of requests.
const (
	// MaxRows bounds offset and limit of a page together.
	MaxRows = 10000
	// DefaultRows is the limit of a page that asks for none.
	DefaultRows = 100
	// MaxSeries bounds the limit of PathHistory.
	MaxSeries = 1000
)

// Error is the body of each answer whose status is not 2xx.
type Error struct {
	Error string `json:"error"`
	// Of a filter that cannot be parsed: what the text was, and the bytes of it that
	// are wrong.
	Filter string `json:"filter,omitempty"`
	At     int    `json:"at,omitempty"`
	End    int    `json:"end,omitempty"`
}

// Version says who answers.
type Version struct {
	API     string    `json:"api"` // "v1"
	Version string    `json:"version"`
	Node    string    `json:"node"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// Namespace is the inode of the network namespace.
	Namespace uint64 `json:"network_namespace"`
	// Actions is set if this client may do more than read.
	Actions bool `json:"actions"`
}

// Connection is an open connection, or the record of one that has ended. Its fields
// are those of docs/connection-log.md; State is present only for open ones.
type Connection struct {
	Time       time.Time `json:"time"`
	ID         uint64    `json:"id"`
	State      string    `json:"state,omitempty"` // connecting or open
	Event      string    `json:"event,omitempty"` // open or refused; absent when the connection has ended
	Protocol   string    `json:"protocol"`
	Path       string    `json:"path"`
	Client     string    `json:"client"`
	ClientNode string    `json:"client_node,omitempty"`
	ClientPod  string    `json:"client_pod,omitempty"` // if it is known
	Via        string    `json:"via,omitempty"`
	VIP        string    `json:"vip"`
	VIPKind    string    `json:"vip_kind"`
	Service    string    `json:"service,omitempty"`
	Endpoint   string    `json:"endpoint,omitempty"`
	Pod        string    `json:"pod,omitempty"`
	Node       string    `json:"node,omitempty"`
	Zone       string    `json:"zone,omitempty"`
	Source     string    `json:"source,omitempty"`
	SourceAddr string    `json:"source_address,omitempty"`
	Affinity   string    `json:"affinity"`
	Attempts   int       `json:"attempts"`
	Failed     []Attempt `json:"failed_attempts,omitempty"`
	// Times in microseconds since Time; nil before they are known.
	WaitedUS    *int64 `json:"waited_us,omitempty"`
	ConnectUS   *int64 `json:"connect_us,omitempty"`
	FirstByteUS *int64 `json:"first_byte_us,omitempty"`
	DurationUS  int64  `json:"duration_us"`

	BytesFromClient       uint64  `json:"bytes_from_client"`
	BytesFromEndpoint     uint64  `json:"bytes_from_endpoint"`
	DatagramsFromClient   *uint64 `json:"datagrams_from_client,omitempty"`
	DatagramsFromEndpoint *uint64 `json:"datagrams_from_endpoint,omitempty"`
	MessagesFromClient    *uint64 `json:"messages_from_client,omitempty"`
	MessagesFromEndpoint  *uint64 `json:"messages_from_endpoint,omitempty"`
	StreamsFromClient     *uint16 `json:"streams_from_client,omitempty"`
	StreamsToClient       *uint16 `json:"streams_to_client,omitempty"`
	// What the transport of an open connection says at this moment; nil where it is not
	// known. Times are in microseconds, Retransmits and Lost in segments, the others in bytes.
	IdleUS              *int64  `json:"idle_us,omitempty"`
	ClientRTTUS         *int64  `json:"client_rtt_us,omitempty"`
	ClientIdleUS        *int64  `json:"client_idle_us,omitempty"`
	ClientUnacked       *uint64 `json:"client_unacked,omitempty"`
	ClientUnsent        *uint64 `json:"client_unsent,omitempty"`
	ClientWindow        *uint64 `json:"client_window,omitempty"`
	ClientRetransmits   *uint64 `json:"client_retransmits,omitempty"`
	ClientLost          *uint64 `json:"client_lost,omitempty"`
	EndpointRTTUS       *int64  `json:"endpoint_rtt_us,omitempty"`
	EndpointIdleUS      *int64  `json:"endpoint_idle_us,omitempty"`
	EndpointUnacked     *uint64 `json:"endpoint_unacked,omitempty"`
	EndpointUnsent      *uint64 `json:"endpoint_unsent,omitempty"`
	EndpointWindow      *uint64 `json:"endpoint_window,omitempty"`
	EndpointRetransmits *uint64 `json:"endpoint_retransmits,omitempty"`
	EndpointLost        *uint64 `json:"endpoint_lost,omitempty"`
	// Packets were refused or dropped, if Event is refused.
	Packets uint64 `json:"packets,omitempty"`
	End     string `json:"end,omitempty"`
	// ProxyNode is the node of the proxy that answered: programs set it that ask several.
	ProxyNode string `json:"proxy_node,omitempty"`
	// Verdict is in the answer of PathConnection alone.
	Verdict *Verdict `json:"verdict,omitempty"`

	// Lost is set in a line of its own of a stream: so many records were dropped
	// before the next line, because the reader was too slow.
	Lost uint64 `json:"lost,omitempty"`
	// Past is set in the first line of PathPast, which has nothing else.
	Past *Past `json:"past,omitempty"`
}

// Verdict says who delays, or has ended, a connection.
type Verdict struct {
	Who string `json:"who"` // one of Culprits
	Why string `json:"why"`
}

// Culprits are the values of Verdict.Who.
var Culprits = []string{"client", "client_network", "node", "pod_network", "pod", "nobody"}

// Past is what the proxy keeps of connections that ended.
type Past struct {
	Since time.Time `json:"since"` // the records of those that ended later are kept
	Kept  int       `json:"kept"`
	Lost  uint64    `json:"lost,omitempty"` // records since then that are not kept
}

// Attempt is a failed attempt to connect.
type Attempt struct {
	Endpoint string `json:"endpoint,omitempty"`
	Pod      string `json:"pod,omitempty"`
	Error    string `json:"error"`
	US       int64  `json:"us"`
}

// Connections is one page.
type Connections struct {
	Open        int          `json:"open"`    // connections that were looked at
	Matched     int          `json:"matched"` // those that match the filter
	Connections []Connection `json:"connections"`
}

// Services is one page of service ports.
type Services struct {
	Matched int `json:"matched"`
	// Partial is set if the filter has terms that only connections have, such as
	// client: they were passed over.
	Partial  bool      `json:"partial,omitempty"`
	Services []Service `json:"services"`
}

// Service is one port of a Service.
type Service struct {
	Service  string   `json:"service"` // namespace/name:port
	Protocol string   `json:"protocol"`
	Type     string   `json:"type"`
	Port     uint16   `json:"port"`
	NodePort uint16   `json:"node_port,omitempty"`
	VIPs     []string `json:"vips,omitempty"`
	// Internal and External are the traffic policies: Cluster or Local.
	Internal string  `json:"internal_traffic_policy"`
	External string  `json:"external_traffic_policy"`
	Affinity float64 `json:"affinity_seconds,omitempty"`
	// Algorithm chooses endpoints. Annotations are those of the Service that have an effect,
	// by their whole names.
	Algorithm   string            `json:"algorithm,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Held connections wait for an endpoint, and queued ones for a place at a limit.
	Held      int        `json:"held,omitempty"`
	Queued    int        `json:"queued,omitempty"`
	Endpoints []Endpoint `json:"endpoints"`
	Totals    Totals     `json:"totals"`
}

// Endpoint is one endpoint of a service port.
type Endpoint struct {
	Endpoint    string `json:"endpoint"`
	Pod         string `json:"pod,omitempty"`
	Node        string `json:"node,omitempty"`
	Zone        string `json:"zone,omitempty"`
	Local       bool   `json:"local,omitempty"`
	Ready       bool   `json:"ready"`
	Serving     bool   `json:"serving"`
	Terminating bool   `json:"terminating,omitempty"`
	Standing
}

// Totals are the counters of a service port since the proxy started.
type Totals struct {
	Opened            uint64            `json:"opened"`
	Open              int64             `json:"open"`
	Retried           uint64            `json:"retried"`
	Attempts          uint64            `json:"attempts"`
	FailedAttempts    map[string]uint64 `json:"failed_attempts,omitempty"` // by error
	Ended             map[string]uint64 `json:"ended,omitempty"`           // by end
	BytesFromClient   uint64            `json:"bytes_from_client"`
	BytesFromEndpoint uint64            `json:"bytes_from_endpoint"`
}

// Frame is what happened in an interval, in groups.
type Frame struct {
	Time    time.Time `json:"time"`
	Seconds float64   `json:"seconds"` // the length of the interval
	By      []string  `json:"by"`
	Total   Rates     `json:"total"`
	// Rows are the groups in the order that was asked for, at most as many as were
	// asked for; Groups is how many there are.
	Rows   []Rates `json:"rows"`
	Groups int     `json:"groups"`
	// Lost counts records that could not be read in time in this interval.
	Lost uint64 `json:"lost,omitempty"`
}

// Rates are the rates of one group. The fields that the grouping does not name are
// empty.
type Rates struct {
	Service  string `json:"service,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	Endpoint string `json:"endpoint,omitempty"`
	Pod      string `json:"pod,omitempty"`
	Node     string `json:"node,omitempty"`
	Zone     string `json:"zone,omitempty"`
	Client   string `json:"client,omitempty"` // an address
	// ProxyNode is the node of the proxy that answered: programs set it that ask several.
	ProxyNode string `json:"proxy_node,omitempty"`

	Open       int     `json:"open"`       // connections, at the end of the interval
	Connecting int     `json:"connecting"` // those among them without an endpoint
	Opened     float64 `json:"opened"`     // per second, like all below
	Ended      float64 `json:"ended"`
	// Failed are connections that reached no endpoint or that an endpoint broke.
	Failed float64 `json:"failed"`
	// Broken are those among them that had reached an endpoint: it has reset them, or
	// answers no more.
	Broken float64 `json:"broken"`
	// FailedAttempts are those at this endpoint, or of this service. SavedAttempts are
	// those among them after which another endpoint served the client.
	FailedAttempts    float64 `json:"failed_attempts"`
	SavedAttempts     float64 `json:"saved_attempts"`
	BytesFromClient   float64 `json:"bytes_from_client"`
	BytesFromEndpoint float64 `json:"bytes_from_endpoint"`
	// Answered are connections whose endpoint sent its first byte, and Unanswered those that
	// ended without one although the client had sent something. Waiting are open ones like
	// those, at the end of the interval. UnansweredUS is the longest that one of them waited,
	// in microseconds.
	Answered     float64 `json:"answered"`
	Unanswered   float64 `json:"unanswered"`
	Waiting      int     `json:"waiting"`
	UnansweredUS int64   `json:"unanswered_us,omitempty"`
	// Times until an endpoint answered, in microseconds; absent without connections. With
	// by=endpoint, times are from the attempt at this endpoint, else from the acceptance.
	ConnectP50US int64 `json:"connect_p50_us,omitempty"`
	ConnectP99US int64 `json:"connect_p99_us,omitempty"`
	// Times until the endpoint's first byte, likewise.
	FirstP50US int64 `json:"first_byte_p50_us,omitempty"`
	FirstP99US int64 `json:"first_byte_p99_us,omitempty"`
	// Times from the acceptance to the end, of connections that ended.
	DurationP50US int64 `json:"duration_p50_us,omitempty"`
	DurationP99US int64 `json:"duration_p99_us,omitempty"`
}

// History are the rates of the last minutes, in intervals.
type History struct {
	// Began is when measuring began: at the first request after a pause.
	Began time.Time `json:"began"`
	// Times are the ends of the intervals in Unix seconds, Seconds their lengths.
	Times   []float64 `json:"times"`
	Seconds []float64 `json:"seconds"`
	// Lost counts records of each interval that could not be read in time.
	Lost []uint64 `json:"lost"`
	// LeftOut counts connections that opened in each interval and are in no series
	// but the one of all connections: there are too many groups.
	LeftOut []uint64 `json:"left_out"`
	// Matched is how many series there are; Series has at most as many as were asked
	// for.
	Matched int      `json:"matched"`
	Series  []Series `json:"series"`
}

// Series are the rates of one group over time: one number for each interval.
type Series struct {
	Service  string `json:"service,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	Endpoint string `json:"endpoint,omitempty"`
	Pod      string `json:"pod,omitempty"`
	Node     string `json:"node,omitempty"`
	Zone     string `json:"zone,omitempty"`

	Open              []uint32  `json:"open"`   // connections, at the end of the interval
	Opened            []float64 `json:"opened"` // per second, like the next ones; see Rates
	Failed            []float64 `json:"failed"`
	FailedAttempts    []float64 `json:"failed_attempts"`
	BytesFromClient   []float64 `json:"bytes_from_client"`
	BytesFromEndpoint []float64 `json:"bytes_from_endpoint"`
	// Times until an endpoint answered, in microseconds; 0 without connections.
	ConnectP50US []uint32 `json:"connect_p50_us"`
	ConnectP99US []uint32 `json:"connect_p99_us"`
	// Times until the endpoint's first byte, likewise.
	FirstP50US []uint32 `json:"first_byte_p50_us"`
	FirstP99US []uint32 `json:"first_byte_p99_us"`
}

// Failures are the last failed attempts and broken connections of the node, newest first.
type Failures struct {
	Failures []Failure `json:"failures"`
}

// Failure is a failed attempt to connect to an endpoint, or a connection that its endpoint
// broke: its Error is endpoint_reset or endpoint_timeout then. With Packets, it is packets
// to VIP that were refused or dropped.
type Failure struct {
	Time     time.Time `json:"time"`
	ID       uint64    `json:"id"` // of the connection
	Client   string    `json:"client"`
	Service  string    `json:"service,omitempty"`
	Endpoint string    `json:"endpoint,omitempty"`
	Pod      string    `json:"pod,omitempty"`
	Node     string    `json:"node,omitempty"`
	Error    string    `json:"error"`
	US       int64     `json:"us"`
	Packets  uint64    `json:"packets,omitempty"`
	VIP      string    `json:"vip,omitempty"`
	// ProxyNode is the node of the proxy that answered: programs set it that ask several.
	ProxyNode string `json:"proxy_node,omitempty"`
}

// Close asks to end connections. It is the body of POST PathClose.
type Close struct {
	// Filter must not be empty: all connections are selected by one that each
	// matches, such as id>0.
	Filter string `json:"filter"`
	// Limit bounds how many are ended; 0 means no bound.
	Limit int `json:"limit,omitempty"`
	// DryRun only counts.
	DryRun bool `json:"dry_run,omitempty"`
}

// Closed is the answer to Close.
type Closed struct {
	Matched int `json:"matched"` // with DryRun
	Ended   int `json:"ended"`
}

// Drain asks to drain endpoints, or to take them back. It is the body of POST
// PathDrain.
type Drain struct {
	// Endpoint is an address, an address and port, or namespace/name of a pod.
	Endpoint string `json:"endpoint"`
	Back     bool   `json:"back,omitempty"`
}

// Drains are the endpoints that are drained.
type Drains struct {
	Drained []Drained `json:"drained"`
	// Changed is how many entries the request has added or removed.
	Changed int `json:"changed"`
}

// Drained is an endpoint that new connections avoid.
type Drained struct {
	Endpoint string    `json:"endpoint"` // an address, or an address and port
	Pod      string    `json:"pod,omitempty"`
	Since    time.Time `json:"since"`
	Services []string  `json:"services"` // that have it
	Open     int       `json:"open"`     // connections to it
	// LastResort names the services among them that have no other ready endpoint, or
	// none on this node where the traffic policy is Local, so that new connections still
	// go to this one.
	LastResort []string `json:"last_resort,omitempty"`
}

// Verbosity asks for another verbosity of the program's log. It is the body of POST
// PathVerbosity.
type Verbosity struct {
	V int `json:"v"`
	// Seconds is how long; then the verbosity of the flag comes back.
	Seconds int `json:"seconds"`
}

// Status is the state of the proxy.
type Status struct {
	Version
	Source      string    `json:"source"` // manifests DIR, or cluster URL
	Connected   *bool     `json:"connected,omitempty"`
	Ready       bool      `json:"ready"` // a configuration is wholly in force
	Applied     time.Time `json:"applied"`
	Trouble     string    `json:"trouble,omitempty"` // what is not in force, and why
	Failures    uint64    `json:"configuration_failures"`
	Steering    Steering  `json:"steering"`
	Ports       int       `json:"service_ports"`
	Endpoints   int       `json:"endpoints"`
	Problems    []Problem `json:"problems,omitempty"` // at most 100
	ProblemsAll int       `json:"problems_count"`
	// Connections and Sessions are relayed ones, Flows those that the kernel forwards.
	Connections int64     `json:"connections"`
	Sessions    int64     `json:"udp_sessions"`
	Limit       int64     `json:"connections_limit"`
	DataPath    string    `json:"data_path"`                      // relay, or kernel; the latter beside the relay
	DataPathWhy string    `json:"data_path_reason,omitempty"`     // why it is the relay
	NodeRelayed string    `json:"node_clients_relayed,omitempty"` // why new connections of the node's own clients are relayed beside kernel flows
	Flows       int64     `json:"flows"`
	FlowsLimit  int64     `json:"flows_limit,omitempty"`
	Judged      string    `json:"forward_rules,omitempty"` // rules for forwarded packets: the relay refuses others' clients
	Drained     []Drained `json:"drained,omitempty"`
	Log         LogState  `json:"log"`
	AccessLog   Records   `json:"access_log"`
	// Nodes are those whose proxies are asked: programs set it that ask several.
	Nodes []ProxyNode `json:"nodes,omitempty"`
}

// ProxyNode is a node whose proxy is asked, and why it does not answer.
type ProxyNode struct {
	Node    string `json:"node"`
	Trouble string `json:"trouble,omitempty"`
}

// Steering is the state of what is steered.
type Steering struct {
	Mode      string `json:"mode"`
	Choice    string `json:"choice"` // why this mode
	Complete  bool   `json:"complete"`
	Steered   int    `json:"steered"`   // destinations
	Refused   int    `json:"refused"`   // that refuse
	Silent    int    `json:"silent"`    // that drop
	Own       int    `json:"own"`       // on this node's addresses, by bound sockets
	Lingering int    `json:"lingering"` // that are gone and still carry connections
	Repairs   uint64 `json:"repairs"`
	Conflicts int64  `json:"port_conflicts"`  // ports that other programs hold
	Unclaimed int64  `json:"ports_unclaimed"` // ports that a limit or a missing right keeps from being served
}

// Destinations is one page of what the steering plan names, sorted by address.
type Destinations struct {
	Matched      int           `json:"matched"`
	Destinations []Destination `json:"destinations"`
}

// Destination is an address and port of the steering plan.
type Destination struct {
	Destination string `json:"destination"`
	Protocol    string `json:"protocol"`
	// Steering is what happens there: one of Steerings.
	Steering string `json:"steering"`
	Service  string `json:"service,omitempty"`
}

// Steerings are the values of Destination.Steering. own are addresses of this node that
// sockets are bound to; lingering are gone, but connections to them go on.
var Steerings = []string{"steered", "refused", "dropped", "own", "lingering"}

// Problem is an object that is not served as it says.
type Problem struct {
	Object string `json:"object"`
	Text   string `json:"text"`
}

// LogState is the verbosity of the program's log.
type LogState struct {
	V     int        `json:"v"`
	Until *time.Time `json:"until,omitempty"`
}

// Records are the counts of the access log.
type Records struct {
	To      string `json:"to"` // a file, - or off
	Queued  uint64 `json:"queued"`
	Dropped uint64 `json:"dropped"`
	Written uint64 `json:"written"`
	Lost    uint64 `json:"lost"`
}

// Config is the effective configuration: each flag with its value.
type Config struct {
	Flags map[string]string `json:"flags"`
}

// Completions are what a filter may go on with.
type Completions struct {
	// Start is the byte of the filter from which a suggestion replaces its text.
	Start       int          `json:"start"`
	Suggestions []Suggestion `json:"suggestions"`
}

// Suggestion is a text that may follow, and what it is.
type Suggestion struct {
	Text  string `json:"text"`
	About string `json:"about,omitempty"`
}
