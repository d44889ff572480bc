package filter

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// compiler makes a value of a field a match.
type compiler func(op operator, text string) (match, error)

// field is something that a connection has.
type field struct {
	name    string
	about   string
	example string   // of a value
	compile compiler // nil for client_pod, whose values only a running proxy knows
	values  []string // all values of a field with a fixed set; nil for others
	order   bool     // it takes <, <=, > and >=
	// configured is set if a Service and one of its endpoints decide.
	configured bool
	// open is set if only the transport of an open connection says it.
	open bool
}

// usage is a term with the field.
func (f *field) usage() string { return f.name + "=" + f.example }

// fields by their names. docs/admin-api.md lists them.
var fields = make(map[string]*field)

func init() {
	for i := range configuredFields {
		configuredFields[i].configured = true
	}
	for _, list := range [][]field{configuredFields, otherFields, setFields, numberFields} {
		for i := range list {
			fields[list[i].name] = &list[i]
		}
	}
}

// configuredFields are those that a Service and one of its endpoints decide.
var configuredFields = []field{
	{name: "service", about: "the Service: name, namespace/name or namespace/name:port", example: "shop/cart", compile: services},
	{name: "namespace", about: "the Service's namespace", example: "shop", compile: names(func(r *conntrack.Record) string { return portOf(r).Name.Namespace })},
	{name: "vip", about: "the destination that the client used", example: "10.96.0.10:80", compile: places(func(r *conntrack.Record) netip.AddrPort { return r.VIP })},
	{name: "endpoint", about: "the endpoint: the one that answered, else the one tried last", example: "10.0.0.7", compile: places(func(r *conntrack.Record) netip.AddrPort { return endpointOf(r).Addr })},
	{name: "tried", about: "an endpoint that answered or failed", example: "10.0.0.7", compile: tried},
	{name: "pod", about: "the endpoint's pod: name or namespace/name", example: "shop/cart-*",
		compile: qualified(func(r *conntrack.Record) *service.Name { return &endpointOf(r).Pod })},
	{name: "node", about: "the endpoint's node", example: "node-b", compile: names(func(r *conntrack.Record) string { return endpointOf(r).Node() })},
	{name: "zone", about: "the endpoint's zone", example: "z2", compile: names(func(r *conntrack.Record) string { return endpointOf(r).Zone() })},
	set("protocol", "the protocol", "UDP", func(r *conntrack.Record) string { return r.Protocol.String() }, service.TCP, service.UDP, service.SCTP),
}

// otherFields are those that belong to no other list.
var otherFields = []field{
	{name: "client", about: "the client's address and port", example: "10.1.0.0/16", compile: places(func(r *conntrack.Record) netip.AddrPort { return r.Client })},
	{name: "client_node", about: "this node, if the client is one of its own processes", example: "node-a", compile: names(func(r *conntrack.Record) string { return r.ClientNode() })},
	{name: "client_pod", about: "the client's pod, if it is known: name or namespace/name", example: "shop/web-*"},
	{name: "via", about: "the load balancer that named the client by the PROXY protocol", example: "10.0.0.2", compile: places(func(r *conntrack.Record) netip.AddrPort { return r.Via() })},
	{name: "source_address", about: "the address that the endpoint sees", example: "10.0.0.1", compile: places(func(r *conntrack.Record) netip.AddrPort { return r.SourceAddr })},
	{name: "error", about: "why an attempt failed", example: "timeout", compile: failedWith, values: texts(conntrack.DialErrors()...)},
}

// setFields have a fixed set of values.
var setFields = []field{
	set("path", "the data path", "relay", func(r *conntrack.Record) string { return r.Path.String() }, conntrack.Paths()...),
	set("state", "whether an endpoint answered, and whether the connection has ended", "open", func(r *conntrack.Record) string { return r.State().String() }, conntrack.States()...),
	set("end", "who ended the connection and how", "endpoint_reset", func(r *conntrack.Record) string { return r.End.String() }, conntrack.Ends()...),
	set("vip_kind", "the kind of the destination", "NodePort", func(r *conntrack.Record) string { return r.Kind.String() },
		service.ClusterIP, service.ExternalIP, service.LoadBalancer, service.NodePort),
	set("affinity", "the result of session affinity", "moved", func(r *conntrack.Record) string { return r.Affinity.String() },
		balancer.AffinityNone, balancer.AffinityNew, balancer.AffinityHit, balancer.AffinityMoved),
	set("source", "whose address the endpoint sees", "client", func(r *conntrack.Record) string {
		if r.Endpoint == nil {
			return ""
		}
		return r.Source.String()
	}, policy.SourceNode, policy.SourceClient),
}

// numberFields have an order.
var numberFields = []field{
	number("id", "the number of the connection", "17", parseCount, func(r *conntrack.Record) (int64, bool) { return int64(r.ID), true }),
	number("attempts", "attempts to connect to an endpoint", "2..5", parseCount, func(r *conntrack.Record) (int64, bool) { return int64(r.Attempts), true }),
	number("failures", "failed attempts, at most 16", "1..3", parseCount, func(r *conntrack.Record) (int64, bool) { return int64(len(r.Failed)), true }),
	number("bytes", "bytes, both ways", "1MB..1GB", parseSize, func(r *conntrack.Record) (int64, bool) { return int64(r.BytesFromClient + r.BytesFromEndpoint), true }),
	number("bytes_from_client", "bytes from the client", "1MB..1GB", parseSize, func(r *conntrack.Record) (int64, bool) { return int64(r.BytesFromClient), true }),
	number("bytes_from_endpoint", "bytes from the endpoint", "1MB..1GB", parseSize, func(r *conntrack.Record) (int64, bool) { return int64(r.BytesFromEndpoint), true }),
	number("duration", "time from the start to the end, or to now", "1s..1m", parseTime, func(r *conntrack.Record) (int64, bool) { return r.Duration, true }),
	number("waited", "time before the first attempt, for a PROXY header, an endpoint or a place", "100ms..5s", parseTime, func(r *conntrack.Record) (int64, bool) { return r.WaitTime(), r.WaitTime() > 0 }),
	number("connect", "time until an endpoint answered", "100ms..5s", parseTime, func(r *conntrack.Record) (int64, bool) { return r.ConnectTime, r.Connected }),
	number("first_byte", "time until the endpoint's first byte", "1s..1m", parseTime, func(r *conntrack.Record) (int64, bool) { return r.FirstByte, r.FirstByte > 0 }),
	transport("idle", "time since the last bytes of either side, of an open connection", "5m..1h", parseTime, func(t *conntrack.Transport) (int64, bool) { return t.Idle, true }),
	transport("rtt", "the longer round-trip time of both sides, of an open TCP connection", "50ms..1s", parseTime, (*conntrack.Transport).RTT),
	transport("client_rtt", "the round-trip time to the client", "50ms..1s", parseTime, func(t *conntrack.Transport) (int64, bool) { return t.Client.RTT, t.Client.RTT > 0 }),
	transport("endpoint_rtt", "the round-trip time to the endpoint", "5ms..1s", parseTime, func(t *conntrack.Transport) (int64, bool) { return t.Endpoint.RTT, t.Endpoint.RTT > 0 }),
	transport("retransmits", "segments of an open TCP connection that were sent again, to both sides or by them", "1..10", parseCount, (*conntrack.Transport).Retransmits),
	transport("unacked", "bytes that client and endpoint have not acknowledged, of an open TCP connection", "64KiB..1MB", parseSize, (*conntrack.Transport).Unacked),
}

// set returns a field with a fixed set of values.
func set[T fmt.Stringer](name, about, example string, get func(*conntrack.Record) string, all ...T) field {
	values := texts(all...)
	return field{name: name, about: about, example: example, compile: enumerated(get, values), values: values}
}

// number returns a field with an order. get returns false if there is no value.
func number(name, about, example string, parse func(string) (int64, error), get func(*conntrack.Record) (int64, bool)) field {
	return field{name: name, about: about, example: example, compile: numbers(get, parse), order: true}
}

// transport returns a number that only the transport of an open connection says.
func transport(name, about, example string, parse func(string) (int64, error), get func(*conntrack.Transport) (int64, bool)) field {
	f := number(name, about, example, parse, func(r *conntrack.Record) (int64, bool) {
		t := r.Transport()
		if t == nil {
			return 0, false
		}
		return get(t)
	})
	f.open = true
	return f
}

func texts[T fmt.Stringer](all ...T) []string {
	out := make([]string, len(all))
	for i, v := range all {
		out[i] = v.String()
	}
	return out
}

// What stands for the endpoint and the service port of a connection that has none.
var (
	noEndpoint service.Endpoint
	noPort     service.Port
)

func endpointOf(r *conntrack.Record) *service.Endpoint { return cmp.Or(r.Endpoint, &noEndpoint) }

func portOf(r *conntrack.Record) *service.Port { return cmp.Or(r.Port, &noPort) }

// mentions reports whether a name or an address of the connection contains a text in
// lower case.
func mentions(r *conntrack.Record, text string) bool {
	if r.Port != nil {
		n := &r.Port.Name
		if strings.Contains(n.Namespace, text) || strings.Contains(n.Name.Name, text) || n.Port != "" && strings.Contains(n.Port, text) {
			return true
		}
		name, port, ended := strings.Cut(text, ":")
		if spans(&n.Name, name, ended) && (!ended || n.Port != "" && strings.HasPrefix(n.Port, port)) {
			return true
		}
	}
	if inAddress(r.Client, text) || inAddress(r.VIP, text) {
		return true
	}
	ep := r.Endpoint
	return ep != nil && (inAddress(ep.Addr, text) || strings.Contains(ep.Pod.Name, text) || spans(&ep.Pod, text, false) ||
		strings.Contains(ep.Node(), text) || containsFold(ep.Zone(), text))
}

// spans reports whether namespace/name contains a text that has the slash, or if it ended
// there, ends with a text.
func spans(n *service.Name, text string, ended bool) bool {
	in, name, slash := strings.Cut(text, "/")
	switch {
	case slash && ended:
		return strings.HasSuffix(n.Namespace, in) && n.Name == name
	case slash:
		return strings.HasSuffix(n.Namespace, in) && strings.HasPrefix(n.Name, name)
	}
	return ended && strings.HasSuffix(n.Name, text)
}

// containsFold reports whether a name, which may have capitals, contains a text in lower
// case. It allocates nothing.
func containsFold(name, text string) bool {
	for i := 0; i+len(text) <= len(name); i++ {
		if strings.EqualFold(name[i:i+len(text)], text) {
			return true
		}
	}
	return false
}

// inAddress reports whether the text of an address contains another text.
func inAddress(a netip.AddrPort, text string) bool {
	if !a.IsValid() {
		return false
	}
	var buf [64]byte
	return strings.Contains(string(a.AppendTo(buf[:0])), text)
}
