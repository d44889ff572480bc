package report

import (
	"math"
	"strconv"
	"strings"
)

// Metric is a row of the table.
type Metric struct {
	ID     string
	Title  string
	Unit   string
	Lower  bool   // less is better
	Ratios bool   // show Sluice's figure divided by another peer's
	Chart  bool   // it has a panel in the chart
	Page   string // its column on the page, where benchmarks.json has the others; empty for none
}

// Metrics lists every row, in the table's order. A title that begins with …
// continues the last title that does not.
var Metrics = []Metric{
	{ID: "bulk1.rate", Title: "bulk, 1 stream", Unit: "Gbit/s", Ratios: true, Chart: true, Page: "bulk, 1 stream"},
	{ID: "bulk1.cpu", Title: "… relay's CPU for each GB", Unit: "s", Lower: true, Ratios: true},
	{ID: "bulk1.machine", Title: "… whole machine's CPU for each GB", Unit: "s", Lower: true, Ratios: true},
	{ID: "bulk16.rate", Title: "bulk, 16 streams", Unit: "Gbit/s", Ratios: true, Chart: true},
	{ID: "bulk16.cpu", Title: "… relay's CPU for each GB", Unit: "s", Lower: true, Ratios: true, Chart: true},
	{ID: "bulk16.machine", Title: "… whole machine's CPU for each GB", Unit: "s", Lower: true, Ratios: true},
	{ID: "up1.rate", Title: "bulk upload, 1 stream", Unit: "Gbit/s", Ratios: true},
	{ID: "up16.rate", Title: "bulk upload, 16 streams", Unit: "Gbit/s", Ratios: true},
	{ID: "rr1.p50", Title: "request-response, 1 client, p50", Unit: "us", Lower: true, Ratios: true, Chart: true, Page: "p50 of a request, 1 client"},
	{ID: "rr1.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "rr64.rate", Title: "request-response, 64 clients", Unit: "/s", Ratios: true, Chart: true, Page: "requests, 64 clients"},
	{ID: "rr64.p99", Title: "… p99", Unit: "us", Lower: true, Ratios: true},
	{ID: "rr64.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "rr64.machine", Title: "… whole machine's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "crc.rate", Title: "connect-request-close, 32 clients, server closes first", Unit: "/s", Ratios: true, Chart: true, Page: "connections with a request"},
	{ID: "crc.p99", Title: "… p99 of a whole connection", Unit: "us", Lower: true},
	{ID: "crc.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "crc.machine", Title: "… whole machine's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "crc-client.rate", Title: "connect-request-close, 32 clients, client closes first", Unit: "/s", Ratios: true},
	{ID: "crc-reset.rate", Title: "connect-request-close, 32 clients, client resets", Unit: "/s", Ratios: true},
	{ID: "steady.rate", Title: "connect-request-close, long run, server closes first", Unit: "/s"},
	{ID: "steady.last", Title: "… ratio of the last third to the first", Unit: "x"},
	{ID: "steady.failed", Title: "… connections that failed", Lower: true},
	{ID: "steady-client.rate", Title: "connect-request-close, long run, client closes first", Unit: "/s", Ratios: true},
	{ID: "steady-client.last", Title: "… ratio of the last third to the first", Unit: "x"},
	{ID: "steady-client.failed", Title: "… connections that failed", Lower: true},
	{ID: "node-rr1.rate", Title: "request-response, 1 client on the node itself", Unit: "/s", Ratios: true},
	{ID: "node-rr1.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "node-bulk1.rate", Title: "bulk, 1 stream of a client on the node itself", Unit: "Gbit/s", Ratios: true},
	{ID: "node-crc.rate", Title: "connect-request-close, 32 clients on the node itself", Unit: "/s", Ratios: true},
	{ID: "node-crc.machine", Title: "… whole machine's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "mixed.p99", Title: "100 request-response clients beside 100 bulk streams, p99", Unit: "us", Lower: true, Ratios: true, Chart: true},
	{ID: "mixed.p50", Title: "… p50", Unit: "us", Lower: true},
	{ID: "mixed.bulk", Title: "… the bulk streams together", Unit: "Gbit/s"},
	{ID: "idle.pss", Title: "memory for each idle connection", Unit: "B", Lower: true, Ratios: true, Chart: true, Page: "memory for each idle connection"},
	{ID: "idle.fds", Title: "… descriptors", Lower: true},
	{ID: "wrk.rate", Title: "cross-check: wrk, 64 connections kept", Unit: "/s"},
	{ID: "wrk-close.rate", Title: "cross-check: wrk, a connection for each request", Unit: "/s"},
	{ID: "iperf3.rate", Title: "cross-check: iperf3, 1 stream", Unit: "Gbit/s"},
	{ID: "udp-rr1.p50", Title: "UDP request-response, 1 client, p50", Unit: "us", Lower: true, Ratios: true},
	{ID: "udp-rr1.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "udp-rr1.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "udp-rr64.rate", Title: "UDP request-response, 64 clients", Unit: "/s", Ratios: true, Chart: true, Page: "UDP requests, 64 clients"},
	{ID: "udp-rr64.p99", Title: "… p99", Unit: "us", Lower: true, Ratios: true},
	{ID: "udp-rr64.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-rr64.machine", Title: "… whole machine's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-new.rate", Title: "UDP, a new socket for each request, long run", Unit: "/s", Ratios: true, Chart: true, Page: "UDP requests, a new socket for each"},
	{ID: "udp-new.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "udp-new.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "udp-new.machine", Title: "… whole machine's CPU for each 100,000", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-new.lost", Title: "… requests lost", Lower: true},
	{ID: "udp-bulk.rate", Title: "UDP bulk, 1,200-byte datagrams that arrive", Unit: "/s", Ratios: true, Chart: true, Page: "UDP datagrams of 1,200 bytes"},
	{ID: "udp-bulk.loss", Title: "… lost, of what the client sent", Unit: "%", Lower: true},
	{ID: "udp-bulk.cpu", Title: "… relay's CPU for each 100,000 that arrive", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-gso.rate", Title: "… with GSO", Unit: "/s", Ratios: true},
	{ID: "udp-gso.loss", Title: "… with GSO, lost", Unit: "%", Lower: true},
	{ID: "udp-gso.cpu", Title: "… relay's CPU for each 100,000 that arrive", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-tunnel.rate", Title: "UDP bulk, 1,420-byte datagrams that arrive", Unit: "/s", Ratios: true},
	{ID: "udp-tunnel.loss", Title: "… lost, of what the client sent", Unit: "%", Lower: true},
	{ID: "udp-tunnel.cpu", Title: "… relay's CPU for each 100,000 that arrive", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-tunnel-gso.rate", Title: "… with GSO", Unit: "/s", Ratios: true, Chart: true},
	{ID: "udp-tunnel-gso.loss", Title: "… with GSO, lost", Unit: "%", Lower: true},
	{ID: "udp-tunnel-gso.cpu", Title: "… relay's CPU for each 100,000 that arrive", Unit: "s", Lower: true, Ratios: true},
	{ID: "udp-flood.quiet", Title: "UDP, p99 of one client, no flood of another service", Unit: "us", Lower: true},
	{ID: "udp-flood.p99", Title: "… flood of 5,000 new clients a second", Unit: "us", Lower: true, Ratios: true},
	{ID: "udp-flood.times", Title: "… ratio to no flood", Unit: "x", Lower: true},
	{ID: "udp-flood.lost", Title: "… requests lost", Lower: true},
	{ID: "udp-flood-top.p99", Title: "… flood of 20,000 new clients a second", Unit: "us", Lower: true, Ratios: true},
	{ID: "udp-flood-top.times", Title: "… ratio to no flood", Unit: "x", Lower: true},
	{ID: "udp-flood-top.lost", Title: "… requests lost", Lower: true},
	{ID: "udp-idle.pss", Title: "UDP, memory for each of 10,000 idle sessions", Unit: "B", Lower: true, Ratios: true, Chart: true},
	{ID: "udp-idle.fds", Title: "… descriptors", Lower: true},
	{ID: "sctp-rr1.rate", Title: "SCTP request-response, 100 bytes, 1 association", Unit: "/s", Ratios: true},
	{ID: "sctp-rr1.p50", Title: "… p50", Unit: "us", Lower: true, Ratios: true, Page: "p50 of a request of 100 bytes, 1 association"},
	{ID: "sctp-rr1.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "sctp-rr1.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "sctp-rr1.persecond", Title: "… for each second of the guest's CPU", Unit: "/s", Ratios: true},
	{ID: "sctp-rr16.rate", Title: "SCTP request-response, 100 bytes, 16 associations", Unit: "/s", Ratios: true},
	{ID: "sctp-rr16.p50", Title: "… p50", Unit: "us", Lower: true, Ratios: true},
	{ID: "sctp-rr16.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "sctp-rr16.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "sctp-rr16.persecond", Title: "… for each second of the guest's CPU", Unit: "/s", Ratios: true, Page: "requests, 16 associations, for each second of CPU"},
	{ID: "sctp-rr16k.rate", Title: "SCTP request-response, 16 KiB, 1 association", Unit: "/s", Ratios: true},
	{ID: "sctp-rr16k.p50", Title: "… p50", Unit: "us", Lower: true, Ratios: true},
	{ID: "sctp-rr16k.p99", Title: "… p99", Unit: "us", Lower: true},
	{ID: "sctp-rr16k.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "sctp-rr16k.persecond", Title: "… for each second of the guest's CPU", Unit: "/s", Ratios: true},
	{ID: "sctp-bulk.rate", Title: "SCTP messages of 16 KiB, 1 association", Unit: "/s", Ratios: true},
	{ID: "sctp-bulk.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "sctp-bulk.persecond", Title: "… for each second of the guest's CPU", Unit: "/s", Ratios: true, Page: "messages of 16 KiB, 1 association, for each second of CPU"},
	{ID: "sctp-bulk.reads", Title: "… the client's reads for each", Lower: true},
	{ID: "sctp-bulk-wide.rate", Title: "SCTP messages of 16 KiB, a window that does not close", Unit: "/s", Ratios: true},
	{ID: "sctp-bulk-wide.cpu", Title: "… relay's CPU for each 100,000", Unit: "s", Lower: true},
	{ID: "sctp-bulk-wide.persecond", Title: "… for each second of the guest's CPU", Unit: "/s", Ratios: true},
	{ID: "sctp-bulk-wide.reads", Title: "… the client's reads for each", Lower: true},
	{ID: "sctp-idle.pss", Title: "SCTP, memory for each of 1,000 idle associations", Unit: "B", Lower: true, Page: "memory for each idle association"},
	{ID: "sctp-idle.fds", Title: "… descriptors", Lower: true},
}

// protocol selects the metric's table.
func (m Metric) protocol() string {
	switch {
	case strings.HasPrefix(m.ID, "udp-"):
		return "UDP"
	case strings.HasPrefix(m.ID, "sctp-"):
		return "SCTP"
	}
	return "TCP"
}

// continued begins the title of a row that continues the one above.
const continued = "…"

// parent is the title that one beginning with … continues; empty for others.
func (m Metric) parent() string {
	if !strings.HasPrefix(m.Title, continued) {
		return ""
	}
	before := ""
	for _, other := range Metrics {
		if other.ID == m.ID {
			break
		}
		if !strings.HasPrefix(other.Title, continued) {
			before = other.Title
		}
	}
	return before
}

// full is the title where its parent does not stand above it.
func (m Metric) full() string {
	if parent := m.parent(); parent != "" {
		return parent + "," + strings.TrimPrefix(m.Title, continued)
	}
	return m.Title
}

// name is the title with its unit, short below its parent.
func (m Metric) name(below string) string {
	title := m.full()
	if below != "" && m.parent() == below {
		title = m.Title
	}
	return m.withUnit(title)
}

func (m Metric) withUnit(title string) string {
	if m.Unit == "" {
		return title
	}
	return title + " [" + m.Unit + "]"
}

// Number writes a figure with three significant digits, thousands separated.
func Number(v float64) string {
	if math.IsNaN(v) {
		return "–"
	}
	magnitude := math.Abs(v)
	switch {
	case magnitude >= 100 || v == math.Trunc(v):
		return thousands(int64(math.Round(v)))
	case magnitude >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case magnitude >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
}

func thousands(v int64) string {
	sign := ""
	if v < 0 {
		sign, v = "-", -v
	}
	s := strconv.FormatInt(v, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}
