package report

import (
	"fmt"
	"math"
	"slices"
)

// Goal is a target of Sluice's own.
type Goal struct {
	Title   string
	Peer    string
	Metric  string
	Base    string // the peer to compare with; empty for an absolute figure
	AtLeast bool   // the bound is a lower one
	Bound   float64
}

// Peers that a run determines: the steering modes with the lowest and the highest
// median.
const (
	slowest = "slowest"
	fastest = "fastest"
)

var steering = []string{"sluice-nftables", "sluice-iptables", "sluice-sklookup", "sluice-bind"}

// Goals are judged with the whole product in the path, and its access log enabled.
var Goals = []Goal{
	{"bulk, 1 stream", "sluice", "bulk1.rate", "haproxy", true, 1.5},
	{"bulk, 1 stream", "sluice", "bulk1.rate", "direct", true, 0.75},
	{"bulk, 16 streams", "sluice", "bulk16.rate", "haproxy", true, 1.3},
	{"… CPU for each GB", "sluice", "bulk16.cpu", "haproxy", false, 0.7},
	{"request-response, 64 clients", "sluice", "rr64.rate", "haproxy", true, 1.1},
	{"… p99", "sluice", "rr64.p99", "haproxy", false, 1},
	{"… the slowest steering mode", slowest, "rr64.rate", fastest, true, 0.9},
	{"request-response, 1 client, p50", "sluice", "rr1.p50", "haproxy", false, 1},
	{"request-response beside 100 bulk streams, p99", "sluice", "mixed.p99", "haproxy", false, 1},
	{"connect-request-close, 32 clients", "sluice", "crc.rate", "haproxy", true, 1.15},
	{"connect-request-close, 32 clients", "sluice", "crc.rate", "direct", true, 0.75},
	{"… with the access log, ratio to without", "sluice", "crc.rate", "sluice-nolog", true, 0.95},
	{"… with the client's address, ratio to the node's", "sluice-client", "crc.rate", "sluice", true, 0.9},
	{"… by power-of-two, ratio to round-robin", "sluice-p2c", "crc.rate", "sluice", true, 0.98},
	{"… the same, CPU for each connection", "sluice-p2c", "crc.cpu", "sluice", false, 1.02},
	{"… long run, ratio of the last third to the first", "sluice", "steady.last", "", true, 0.9},
	{"… long run, connections that failed", "sluice", "steady.failed", "", false, 0},
	{"… long run, client closes first, ratio of the last third to the first", "sluice", "steady-client.last", "", true, 0.9},
	{"… long run, client closes first, connections that failed", "sluice", "steady-client.failed", "", false, 0},
	{"memory for each idle connection, bytes", "sluice", "idle.pss", "", false, 1024},
	{"descriptors for each idle connection", "sluice", "idle.fds", "", false, 2},
	{"UDP request-response, 64 clients", "sluice", "udp-rr64.rate", "nginx", true, 1.1},
	{"UDP request-response, 64 clients", "sluice", "udp-rr64.rate", "direct", true, 0.7},
	{"UDP request-response, 1 client, p50", "sluice", "udp-rr1.p50", "nginx", false, 1},
	{"UDP, a new socket for each request", "sluice", "udp-new.rate", "direct", true, 0.4},
	{"… requests lost", "sluice", "udp-new.lost", "", false, 0},
	{"UDP bulk, 1,200-byte datagrams", "sluice", "udp-bulk.rate", "nginx", true, 2},
	{"UDP, memory for each idle session, bytes", "sluice", "udp-idle.pss", "", false, 1024},
	{"UDP, flood of 5,000 new clients a second: a neighbour's p99, ratio to no flood", "sluice", "udp-flood.times", "", false, 2},
	{"… the neighbour's requests lost", "sluice", "udp-flood.lost", "", false, 0},
	{"kernel flows: bulk, 1 stream", "sluice-kernel", "bulk1.rate", "direct", true, 0.95},
	{"… request-response, 64 clients", "sluice-kernel", "rr64.rate", "direct", true, 0.92},
	{"… the same, whole machine's CPU", "sluice-kernel", "rr64.machine", "direct", false, 1.1},
	{"… the same, the process's CPU for each 100,000, s", "sluice-kernel", "rr64.cpu", "", false, 0.03},
	{"… request-response, 1 client, p50", "sluice-kernel", "rr1.p50", "direct", false, 1.15},
	{"… connect-request-close, 32 clients", "sluice-kernel", "crc.rate", "direct", true, 0.9},
	{"… the same, whole machine's CPU", "sluice-kernel", "crc.machine", "direct", false, 1.12},
	{"… connect-request-close, 32 clients", "sluice-kernel", "crc.rate", "haproxy", true, 1.3},
	{"… request-response, 1 client on the node itself", "sluice-kernel", "node-rr1.rate", "direct", true, 0.95},
	{"… bulk, 1 stream of such a client", "sluice-kernel", "node-bulk1.rate", "direct", true, 0.95},
	{"… connect-request-close, 32 such clients", "sluice-kernel", "node-crc.rate", "direct", true, 0.9},
	{"… connect-request-close, long run, ratio of the last third to the first", "sluice-kernel", "steady.last", "", true, 0.9},
	{"… the same, connections that failed", "sluice-kernel", "steady.failed", "", false, 0},
	{"… UDP request-response, 64 clients", "sluice-kernel", "udp-rr64.rate", "direct", true, 0.88},
	{"… the same, whole machine's CPU", "sluice-kernel", "udp-rr64.machine", "direct", false, 1.12},
	{"… UDP, a new socket for each request", "sluice-kernel", "udp-new.rate", "direct", true, 0.85},
	{"… the same, whole machine's CPU", "sluice-kernel", "udp-new.machine", "direct", false, 1.25},
	{"… the same, requests lost", "sluice-kernel", "udp-new.lost", "", false, 0},
	{"… descriptors for each idle connection", "sluice-kernel", "idle.fds", "", false, 0},
	{"SCTP request-response, 1 association", "sluice", "sctp-rr1.persecond", "direct", true, 0.45},
	{"SCTP request-response, 16 associations", "sluice", "sctp-rr16.persecond", "direct", true, 0.45},
	{"SCTP messages of 16 KiB", "sluice", "sctp-bulk.persecond", "direct", true, 0.9},
	{"SCTP, memory for each idle association, bytes", "sluice", "sctp-idle.pss", "", false, 2048},
}

// Verdict tells whether a goal is reached.
type Verdict string

// The verdicts. Half of the rounds lie between the quartiles: a goal that lies
// there too is neither met nor missed as far as this run can tell.
const (
	Met     Verdict = "met"
	Missed  Verdict = "missed"
	Unclear Verdict = "unclear"
	Unknown Verdict = "not measured"
)

func (v Verdict) markdown() string {
	if v == Missed {
		return "**missed**"
	}
	return string(v)
}

// Outcome is the result for a goal.
type Outcome struct {
	Goal    Goal
	Found   Spread
	Verdict Verdict
	Who     string // who was slowest and fastest, if the goal compares these
}

// Judge compares the figures with the goals. It leaves out goals whose columns
// this run did not measure.
func (d *Data) Judge() []Outcome {
	var outcomes []Outcome
	for _, g := range Goals {
		o := Outcome{Goal: g, Verdict: Unknown}
		if g.Peer == slowest {
			g.Peer, g.Base = d.extremes(g.Metric)
			o.Who = g.Peer + ", " + g.Base
		}
		if !d.concerns(g) {
			continue
		}
		var known bool
		switch {
		case g.Base != "":
			o.Found, known = d.Ratio(g.Peer, g.Base, g.Metric)
		case g.Bound == 0:
			// What must never happen must not happen in any round.
			o.Found, known = d.worst(g)
		default:
			o.Found, known = d.Spread(g.Peer, g.Metric)
		}
		if known {
			o.Verdict = g.verdict(o.Found)
		}
		outcomes = append(outcomes, o)
	}
	return outcomes
}

// concerns tells whether a goal's peers took part in the run, and any peer has
// figures of its metric.
func (d *Data) concerns(g Goal) bool {
	took := func(name string) bool {
		return slices.ContainsFunc(d.Peers, func(p Peer) bool { return p.Name == name })
	}
	return took(g.Peer) && (g.Base == "" || took(g.Base)) && d.has(g.Metric)
}

// extremes names the slowest and the fastest steering mode; none if there are
// fewer than two.
func (d *Data) extremes(metric string) (slow, fast string) {
	least, most := math.Inf(1), 0.0
	for _, name := range steering {
		s, ok := d.Spread(name, metric)
		if ok && s.Median < least {
			least, slow = s.Median, name
		}
		if ok && s.Median > most {
			most, fast = s.Median, name
		}
	}
	if slow == fast {
		return "", ""
	}
	return slow, fast
}

func (d *Data) worst(g Goal) (Spread, bool) {
	_, ok := d.Spread(g.Peer, g.Metric)
	worst := 0.0
	for _, v := range d.Series(g.Peer, g.Metric) {
		if v > worst {
			worst = v
		}
	}
	return Spread{worst, worst, worst}, ok
}

func (g Goal) verdict(s Spread) Verdict {
	better, worse := s.High, s.Low
	sign := 1.0
	if !g.AtLeast {
		better, worse, sign = s.Low, s.High, -1
	}
	switch {
	case sign*worse >= sign*g.Bound:
		return Met
	case sign*better < sign*g.Bound:
		return Missed
	}
	return Unclear
}

// Wanted describes the bound: "at least 1.50 x haproxy".
func (g Goal) Wanted() string {
	word := "at most"
	if g.AtLeast {
		word = "at least"
	}
	if g.Base == "" {
		return word + " " + g.write(g.Bound)
	}
	return word + " " + g.write(g.Bound) + " x " + g.Base
}

// write writes a figure with the goal's precision.
func (g Goal) write(v float64) string {
	if g.Base != "" || g.Bound != math.Trunc(g.Bound) {
		return fmt.Sprintf("%.2f", v)
	}
	return Number(v)
}

// Words describes the result: "1.99 x (1.80 – 2.10)".
func (o Outcome) Words() string {
	if o.Verdict == Unknown {
		return ""
	}
	text, low, high := o.Goal.write(o.Found.Median), o.Goal.write(o.Found.Low), o.Goal.write(o.Found.High)
	if o.Goal.Base != "" {
		text += " x"
	}
	if low != high {
		text += " (" + low + " – " + high + ")"
	}
	if o.Who != "" {
		text += ": " + o.Who
	}
	return text
}
