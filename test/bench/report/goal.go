package report

import "fmt"

// Goal is a figure that Sluice set itself.
type Goal struct {
	Title   string
	Peer    string
	Metric  string
	Base    string // the peer to compare with; empty for the bare figure
	AtLeast bool   // the bound is a lower one
	Bound   float64
}

// Goals are judged with the whole product in the path, its access log on.
var Goals = []Goal{
	{"bulk, 1 stream", "sluice", "bulk1.rate", "haproxy", true, 1.5},
	{"bulk, 1 stream", "sluice", "bulk1.rate", "direct", true, 0.75},
	{"bulk, 16 streams", "sluice", "bulk16.rate", "haproxy", true, 1.3},
	{"connect-request-close, 32 clients", "sluice", "crc.rate", "haproxy", true, 1.15},
	{"connect-request-close, 32 clients", "sluice", "crc.rate", "direct", true, 0.75},
	{"… long run: the last third against the first", "sluice", "steady.last", "", true, 0.9},
	{"… long run: connections that failed", "sluice", "steady.failed", "", false, 0},
	{"… long run, client closes first: last third against first", "sluice", "steady-client.last", "", true, 0.9},
	{"… long run, client closes first: connections that failed", "sluice", "steady-client.failed", "", false, 0},
	{"… with the access log, against without", "sluice", "crc.rate", "sluice-nolog", true, 0.95},
	{"… with the client's address kept, against the node's", "sluice-client", "crc.rate", "sluice", true, 0.9},
	{"request-response, 64 clients", "sluice", "rr64.rate", "haproxy", true, 1.1},
	{"request-response, 64 clients, p99", "sluice", "rr64.p99", "haproxy", false, 1},
	{"request-response, 1 client, p50", "sluice", "rr1.p50", "haproxy", false, 1},
	{"memory for each idle connection, bytes", "sluice", "idle.pss", "", false, 1024},
	{"descriptors for each idle connection", "sluice", "idle.fds", "", false, 2},
	{"CPU for each GB, 16 streams", "sluice", "bulk16.cpu", "haproxy", false, 0.7},
	{"UDP request-response, 64 clients", "sluice", "udp-rr64.rate", "nginx", true, 1.1},
	{"UDP request-response, 64 clients", "sluice", "udp-rr64.rate", "direct", true, 0.7},
	{"UDP request-response, 1 client, p50", "sluice", "udp-rr1.p50", "nginx", false, 1},
	{"UDP, a new socket for each request", "sluice", "udp-new.rate", "direct", true, 0.4},
	{"… requests lost", "sluice", "udp-new.lost", "", false, 0},
	{"UDP bulk, datagrams of 1,200 bytes", "sluice", "udp-bulk.rate", "nginx", true, 2},
	{"p99 of small requests beside 100 bulk streams", "sluice", "mixed.p99", "haproxy", false, 1},
}

// Outcome tells how a goal came out.
type Outcome struct {
	Goal  Goal
	Value float64
	Known bool // false: not measured in this run
	Met   bool
}

// Judge compares the figures with the goals.
func (d *Data) Judge() []Outcome {
	var outcomes []Outcome
	for _, g := range Goals {
		o := Outcome{Goal: g}
		if g.Base == "" {
			var s Spread
			s, o.Known = d.Spread(g.Peer, g.Metric)
			o.Value = s.Median
		} else {
			o.Value, o.Known = d.Ratio(g.Peer, g.Base, g.Metric)
		}
		o.Met = o.Known && (g.AtLeast && o.Value >= g.Bound || !g.AtLeast && o.Value <= g.Bound)
		outcomes = append(outcomes, o)
	}
	return outcomes
}

// Wanted words the bound: "at least 1.50 x haproxy".
func (g Goal) Wanted() string {
	word := "at most"
	if g.AtLeast {
		word = "at least"
	}
	if g.Base == "" {
		return fmt.Sprintf("%s %s", word, Number(g.Bound))
	}
	return fmt.Sprintf("%s %.2f x %s", word, g.Bound, g.Base)
}

// Found words the figure and whether it is enough.
func (o Outcome) Found() string {
	if !o.Known {
		return "not measured"
	}
	value := Number(o.Value)
	if o.Goal.Base != "" {
		value = fmt.Sprintf("%.2f x", o.Value)
	}
	if o.Met {
		return value + ", met"
	}
	return "**" + value + ", missed**"
}
