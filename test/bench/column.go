package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// column is one measurement of every peer.
type column struct {
	id    string
	about string
	extra bool     // only if it is named
	quick bool     // part of a quick run
	fresh bool     // needs a fresh stage, and uses it up
	only  []string // the peers that it applies to; nil for all
	times int      // number of rounds in which it is measured; 0 for all
	long  bool     // takes as long as a long run
	flags []string // of sluice; only with fresh
	tool  string   // the program that it needs
	run   func(*stage) (figures, error)
}

// figures are a column's results by the identifiers of report.Metrics.
type figures map[string]float64

// The sizes in the columns' titles.
const (
	idleConns    = 3000
	besideConns  = 100
	clientCloses = 15000 // connections: well below the node's 28,232 ports
	idleSessions = 10000 // of UDP
	datagramSize = 1200  // bytes: the maximum of DNS and QUIC
	tunnelSize   = 1420  // bytes: WireGuard's, for instance
	floodRate    = 5000  // new clients a second
	floodRateTop = 20000
	floodTurns   = 3
)

// allColumns lists the columns in the order in which they run. Memory comes first:
// a relay that was busy has free memory, which hides what it takes.
func allColumns() []column {
	return []column{
		{id: "idle", about: "memory and descriptors for each of 3,000 idle connections", quick: true, fresh: true, times: 1, run: idle("idle", idleConns, "")},
		{id: "udp-idle", about: "UDP: memory for each of 10,000 idle sessions", fresh: true, times: 1, only: udpPeers, flags: []string{"--max-udp-sessions=12000"}, run: idle("udp-idle", idleSessions, "udp")},
		{id: "bulk1", about: "download, 1 stream", quick: true, run: bulk("bulk1", load.Download, 1)},
		{id: "bulk16", about: "download, 16 streams", quick: true, run: bulk("bulk16", load.Download, 16)},
		{id: "up1", about: "upload, 1 stream", extra: true, run: bulk("up1", load.Upload, 1)},
		{id: "up16", about: "upload, 16 streams", extra: true, run: bulk("up16", load.Upload, 16)},
		{id: "rr1", about: "128 bytes there and back, 1 client", quick: true, run: requests("rr1", load.Spec{Kind: load.Echo, Clients: 1})},
		{id: "rr64", about: "the same, 64 clients", quick: true, run: requests("rr64", load.Spec{Kind: load.Echo, Clients: 64})},
		{id: "crc", about: "connect, 128 bytes there and back, close; 32 clients, the server closes first", quick: true, run: churn("crc", load.ServerCloses)},
		{id: "node-rr1", about: "128 bytes there and back, 1 client on the node itself", only: nodePeers, run: onNode(requests("node-rr1", load.Spec{Kind: load.Echo, Clients: 1}))},
		{id: "node-bulk1", about: "download, 1 stream of a client on the node itself", only: nodePeers, run: onNode(bulk("node-bulk1", load.Download, 1))},
		{id: "node-crc", about: "crc, 32 clients on the node itself", only: nodePeers, run: onNode(churn("node-crc", load.ServerCloses))},
		{id: "mixed", about: "100 request-response clients beside 100 bulk streams", quick: true, run: mixed},
		{id: "udp-rr1", about: "UDP: 128 bytes there and back, 1 client", quick: true, only: udpPeers, run: requests("udp-rr1", load.Spec{Kind: load.UDPEcho, Clients: 1})},
		{id: "udp-rr64", about: "UDP: the same, 64 clients", quick: true, only: udpPeers, run: requests("udp-rr64", load.Spec{Kind: load.UDPEcho, Clients: 64})},
		{id: "udp-bulk", about: "UDP: datagrams of 1,200 bytes one way, 1 client, one by one", quick: true, only: udpPeers, run: pour("udp-bulk", datagramSize, false)},
		{id: "udp-gso", about: "UDP: the same, with GSO (UDP_SEGMENT)", only: udpPeers, run: pour("udp-gso", datagramSize, true)},
		{id: "udp-tunnel", about: "UDP: datagrams of 1,420 bytes, as a tunnel's, one by one", only: udpPeers, run: pour("udp-tunnel", tunnelSize, false)},
		{id: "udp-tunnel-gso", about: "UDP: the same, with GSO", only: udpPeers, run: pour("udp-tunnel-gso", tunnelSize, true)},
		{id: "udp-flood", about: "UDP: 1 client, without and with 5,000 and 20,000 new clients a second of another service", fresh: true, times: 3, only: udpPeers, run: flooded},
		{id: "udp-new", about: "UDP: a new socket for each request, 32 clients, a long run", fresh: true, times: 1, long: true, only: udpPeers, run: freshSockets("udp-new")},
		{id: "wrk", about: "cross-check by wrk, connections kept", tool: "wrk", times: 1, run: wrk("wrk.rate")},
		{id: "wrk-close", about: "cross-check by wrk, a connection for each request", tool: "wrk", times: 1, run: wrk("wrk-close.rate", "-H", "Connection: close")},
		{id: "iperf3", about: "cross-check by iperf3, download, 1 stream", tool: "iperf3", times: 1, run: iperf3},
		{id: "crc-client", about: "as crc, the client closes first; 15,000 connections at most", fresh: true, times: 3, run: churn("crc-client", load.ClientCloses)},
		{id: "crc-reset", about: "as crc, the client resets", extra: true, run: churn("crc-reset", load.ClientResets)},
		{id: "steady", about: "crc, a long run", fresh: true, times: 1, long: true, only: []string{"sluice", "sluice-kernel"}, run: steady("steady", load.ServerCloses)},
		{id: "steady-client", about: "crc-client with no bound, a long run", fresh: true, times: 1, long: true, only: []string{"direct", "haproxy", "sluice", "sluice-kernel"}, run: steady("steady-client", load.ClientCloses)},
	}
}

// perGB and per100k convert CPU time into the table's units; without a relay there
// is none.
func perGB(t time.Duration, bytes uint64) float64 {
	if t == 0 || bytes == 0 {
		return math.NaN()
	}
	return t.Seconds() / (float64(bytes) / 1e9)
}

func per100k(t time.Duration, count uint64) float64 {
	if t == 0 || count == 0 {
		return math.NaN()
	}
	return t.Seconds() / (float64(count) / 1e5)
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func gbit(bytesPerSecond float64) float64 { return bytesPerSecond * 8 / 1e9 }

// figures runs a load and takes figures from its result.
func (s *stage) figures(spec load.Spec, take func(*load.Result) figures) (figures, error) {
	r, err := s.load(spec)
	if err != nil {
		return nil, err
	}
	return take(r), s.clean(r)
}

func bulk(id string, kind load.Kind, streams int) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(load.Spec{Kind: kind, Clients: streams}, func(r *load.Result) figures {
			return figures{
				id + ".rate":    gbit(r.ByteRate),
				id + ".cpu":     perGB(r.Relay, r.Bytes),
				id + ".machine": perGB(r.Machine.Busy, r.Bytes),
			}
		})
	}
}

// requests measures clients that ask and wait for the answer.
func requests(id string, spec load.Spec) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(spec, func(r *load.Result) figures {
			return figures{
				id + ".rate":    r.Rate,
				id + ".p50":     microseconds(r.P50),
				id + ".p99":     microseconds(r.P99),
				id + ".cpu":     per100k(r.Relay, r.Count),
				id + ".machine": per100k(r.Machine.Busy, r.Count),
			}
		})
	}
}

func churn(id string, closes load.Close) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		spec := load.Spec{Kind: load.Churn, Clients: 32, Close: closes}
		if closes == load.ClientCloses {
			spec.Sources, spec.MaxConns = s.world.Clients, clientCloses
		}
		return s.figures(spec, func(r *load.Result) figures {
			return figures{
				id + ".rate":    r.Rate,
				id + ".p99":     microseconds(r.P99),
				id + ".cpu":     per100k(r.Relay, r.Count),
				id + ".machine": per100k(r.Machine.Busy, r.Count),
			}
		})
	}
}

// nodePeers are paths that clients on the node itself can take.
var nodePeers = []string{"direct", "sluice", "sluice-base", "sluice-kernel", "sluice-kernel-base"}

// onNode moves the clients of a column to the node itself.
func onNode(run func(*stage) (figures, error)) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		if err := s.awaitNode(); err != nil {
			return nil, err
		}
		s.clients = s.world.Node
		defer func() { s.clients = s.world.Client }()
		return run(s)
	}
}

// steady shows whether a relay runs out of ports: each connection that it closes
// first towards the server leaves a port in TIME_WAIT for a minute.
func steady(id string, closes load.Close) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		length := s.b.opts.long
		spec := load.Spec{Kind: load.Churn, Clients: 32, Close: closes, Measure: length, Slice: length / 12}
		if closes == load.ClientCloses {
			spec.Sources = s.world.Clients
		}
		return s.figures(spec, func(r *load.Result) figures {
			return figures{
				id + ".rate":   r.Rate,
				id + ".last":   lastAgainstFirst(r.Slices),
				id + ".failed": failures(r),
			}
		})
	}
}

// lastAgainstFirst is the median of the last third divided by that of the first
// third, so that a short disturbance of the machine does not decide.
func lastAgainstFirst(rates []float64) float64 {
	third := len(rates) / 3
	return median(rates[len(rates)-third:]) / median(rates[:third])
}

// median is the middle value, or the mean of the two middle ones; 0 without
// values.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	return (sorted[half] + sorted[(len(sorted)-1)/2]) / 2
}

func mixed(s *stage) (figures, error) {
	return s.figures(load.Spec{Kind: load.Mixed, Clients: besideConns, Beside: besideConns}, func(r *load.Result) figures {
		return figures{
			"mixed.p50":  microseconds(r.P50),
			"mixed.p99":  microseconds(r.P99),
			"mixed.bulk": gbit(r.ByteRate),
		}
	})
}

// udpPeers are the peers that support UDP.
var udpPeers = []string{"direct", "dnat", "nginx", "kube-proxy-nftables", "kube-proxy-iptables", "sluice", "sluice-base",
	"sluice-client", "sluice-kernel", "sluice-nftables", "sluice-iptables", "sluice-sklookup", "sluice-bind"}

// pour sends more than any relay can forward, and counts the datagrams that
// arrive.
func pour(id string, size int, gso bool) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(load.Spec{Kind: load.UDPPour, Clients: 1, Size: size, GSO: gso}, func(r *load.Result) figures {
			return figures{
				id + ".rate": r.Rate,
				id + ".loss": 100 * (1 - float64(r.Count)/float64(max(r.Sent, 1))),
				id + ".cpu":  per100k(r.Relay, r.Count),
			}
		})
	}
}

// freshSockets imitates resolvers. It runs until tables and descriptors are used
// up.
func freshSockets(id string) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(load.Spec{Kind: load.UDPFresh, Clients: 32, Measure: s.b.opts.long}, func(r *load.Result) figures {
			return figures{
				id + ".rate":    r.Rate,
				id + ".p99":     microseconds(r.P99),
				id + ".lost":    failures(r),
				id + ".cpu":     per100k(r.Relay, r.Count),
				id + ".machine": per100k(r.Machine.Busy, r.Count),
			}
		})
	}
}

// flooded measures the effect on one service's client of a flood of new clients of
// another service, at two rates that do not saturate the machine without a relay.
// Measurements without and with a flood alternate, a few times on the same stage.
func flooded(s *stage) (figures, error) {
	if s.world.IPv6 {
		return nil, nil
	}
	if err := s.world.Strangers(load.Strangers); err != nil {
		return nil, err
	}
	steps := []struct {
		id   string
		rate int // new clients a second
	}{{"udp-flood.quiet", 0}, {"udp-flood", floodRate}, {"udp-flood-top", floodRateTop}}
	series := map[string][]float64{}
	f := figures{}
	for range floodTurns {
		quiet := 0.0
		for _, step := range steps {
			r, err := s.load(load.Spec{Kind: load.UDPEcho, Clients: 1, Flood: step.rate})
			if err == nil {
				err = s.clean(r)
			}
			if err != nil {
				return nil, err
			}
			p99 := microseconds(r.P99)
			if step.rate == 0 {
				quiet = p99
				series[step.id] = append(series[step.id], p99)
				continue
			}
			series[step.id+".p99"] = append(series[step.id+".p99"], p99)
			series[step.id+".times"] = append(series[step.id+".times"], p99/quiet)
			f[step.id+".lost"] += failures(r)
		}
	}
	for metric, values := range series {
		f[metric] = median(values)
	}
	return f, nil
}

// failures is the number of failed connections or requests.
func failures(r *load.Result) float64 {
	var sum uint64
	for _, n := range r.Errors {
		sum += n
	}
	return float64(sum)
}

// clean notes failed connections.
func (s *stage) clean(r *load.Result) error {
	for cause, n := range r.Errors {
		s.b.note("%d failed: %s", n, cause)
	}
	if r.Count == 0 && r.Bytes == 0 {
		return fmt.Errorf("no datagram or connection arrived")
	}
	return nil
}

// idle opens connections, UDP sessions or associations, uses each once, and compares the relay's
// memory and descriptors before and after. A few connections before the first
// reading trigger the relay's initial growth, which does not depend on their
// number.
func idle(id string, n int, network string) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		if len(s.relay.PIDs) == 0 {
			return nil, nil
		}
		h, err := s.hold()
		if err != nil {
			return nil, err
		}
		defer h.close()
		if _, err := h.do(load.HoldCommand{Op: "open", Network: network, N: 100}); err != nil {
			return nil, err
		}
		// Reading the metrics takes memory too, so do not do it between the two
		// readings.
		heapBefore := s.metrics()[heapMetric]
		before, err := s.holdings()
		if err != nil {
			return nil, err
		}
		reply, err := h.do(load.HoldCommand{Op: "open", Network: network, N: n})
		if err != nil {
			return nil, err
		}
		for cause, n := range reply.Errors {
			s.b.note("%d failed: %s", n, cause)
		}
		after, err := s.holdings()
		if err != nil {
			return nil, err
		}
		good := float64(reply.Good)
		f := figures{
			id + ".pss": float64(after.memory.PSS-before.memory.PSS) / good,
			id + ".rss": float64(after.memory.RSS-before.memory.RSS) / good,
			id + ".fds": math.Round(float64(after.descriptors-before.descriptors)/good*100) / 100,
		}
		if heapBefore > 0 {
			f[id+".heap"] = (s.metrics()[heapMetric] - heapBefore) / good
		}
		return f, nil
	}
}

// holdings are a relay's memory and descriptors at one time.
type holdings struct {
	memory      procstat.Memory
	descriptors int
	threads     int
}

// heapMetric is the number of bytes of Go's heap in use.
const heapMetric = "go_memstats_heap_inuse_bytes"

// holdings first gives the relay a moment to become idle.
func (s *stage) holdings() (h holdings, err error) {
	time.Sleep(300 * time.Millisecond)
	if h.memory, err = procstat.ReadMemory(s.relay.PIDs); err != nil {
		return h, err
	}
	if h.descriptors, err = procstat.Descriptors(s.relay.PIDs); err != nil {
		return h, err
	}
	h.threads, err = procstat.Threads(s.relay.PIDs)
	return h, err
}

var wrkRate = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)

func wrk(id string, args ...string) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		length := max(int(s.b.opts.measure.Seconds()), 1)
		url := "http://" + netip.AddrPortFrom(s.relay.Targets[0], load.PortHTTP).String() + "/"
		all := append([]string{"-t1", "-c64", fmt.Sprintf("-d%ds", length)}, append(args, url)...)
		out, err := s.world.Client.Run(world.Command{Path: "wrk", Args: all}, time.Duration(length)*time.Second+20*time.Second)
		if err != nil {
			return nil, err
		}
		rate, err := parseWrk(out)
		return figures{id: rate}, err
	}
}

func parseWrk(out []byte) (float64, error) {
	m := wrkRate.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("wrk says no rate: %s", out)
	}
	return strconv.ParseFloat(string(m[1]), 64)
}

func iperf3(s *stage) (figures, error) {
	if s.b.opts.endpoints > 1 {
		// Its two connections would reach two servers.
		return nil, nil
	}
	length := max(int(s.b.opts.measure.Seconds()), 1)
	out, err := s.world.Client.Run(world.Command{Path: "iperf3", Args: []string{
		"-c", s.relay.Targets[0].String(), "-p", strconv.Itoa(load.PortIperf), "-R", "-J", "-t", strconv.Itoa(length),
	}}, time.Duration(length)*time.Second+20*time.Second)
	if err != nil {
		return nil, err
	}
	rate, err := parseIperf(out)
	return figures{"iperf3.rate": rate / 1e9}, err
}

// parseIperf returns the received bits a second.
func parseIperf(out []byte) (float64, error) {
	var doc struct {
		Error string
		End   struct {
			Received struct {
				Bits float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		return 0, fmt.Errorf("iperf3: %w", err)
	}
	if doc.Error != "" || doc.End.Received.Bits == 0 {
		return 0, fmt.Errorf("iperf3 says no rate: %s", doc.Error)
	}
	return doc.End.Received.Bits, nil
}

// missingTool names what to install for a column; empty if nothing is missing.
func (c column) missingTool() string {
	if c.tool == "" {
		return ""
	}
	if _, err := exec.LookPath(c.tool); err != nil {
		return fmt.Sprintf("%s: %s is not installed: apt-get install %s, or test/bench/install-deps.sh", c.id, c.tool, c.tool)
	}
	return ""
}
