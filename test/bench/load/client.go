// Package load makes the benchmark's load: the clients that drive a path, and the
// server at its end. Both are epoll loops with raw system calls on threads of
// their own, so that they take as little as possible of the CPUs that they share
// with the relay. They are the same for every peer.
package load

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/bench/procstat"
)

// Kind is what the clients do.
type Kind string

// The kinds of load.
const (
	Download Kind = "download" // read streams
	Upload   Kind = "upload"   // write streams
	Echo     Kind = "echo"     // request and response on open connections
	Churn    Kind = "churn"    // connect, request, response, close
	Mixed    Kind = "mixed"    // Echo beside Beside streams of Download
	UDPEcho  Kind = "udp-echo" // request and response on open sockets
	UDPFresh Kind = "udp-new"  // the same, with a new socket for each request
	UDPPour  Kind = "udp-bulk" // datagrams one way, from one socket

	SCTPEcho     Kind = "sctp-echo"     // request and response on open associations
	SCTPDownload Kind = "sctp-download" // read messages without end
)

// Close tells which side ends a connection of Churn first.
type Close string

// The ways to end a connection.
const (
	ServerCloses Close = "server" // after its response
	ClientCloses Close = "client" // after it has the response
	ClientResets Close = "reset"  // the same, with a reset
)

// Spec describes one measurement.
type Spec struct {
	Kind    Kind
	Targets []netip.Addr // used in turn
	Sources []netip.Addr // used in turn; nil lets the kernel choose
	Clients int          // connections at a time
	Beside  int          // Mixed: streams
	Close   Close        // Churn
	Threads int          // at most; at least 1
	Size    int          // UDPPour: of a datagram, in bytes; SCTPEcho: of a request and its response; 9 or more
	Window  int          // SCTPDownload: SO_RCVBUF of the client, of which the kernel advertises the half, in bytes; 0 for the kernel's
	GSO     bool         // UDPPour: datagrams leave in GSO batches (UDP_SEGMENT)
	Flood   int          // new clients a second of PortUDPFlood beside the load, each with one datagram; IPv4 only

	Warmup, Measure time.Duration
	Every           time.Duration // Churn: from the begin of a client's connection to that of its next one; 0 for no pause
	MaxConns        uint64        // Churn: the measurement ends after this number; 0 for no limit
	Slice           time.Duration // Churn: also count in slices of this length; 0 for none

	RelayPIDs  []int // whose CPU time is the relay's
	ServerPIDs []int

	Mark string // a line of the console tells this, where the measured time begins and ends; empty for none
}

// Marker begins a line that says that the measured time of a Spec with a Mark begins or
// ends: Marker, "begin" or "end", and the Mark, separated by blanks.
const Marker = "@window"

// mark writes such a line.
func (s *Spec) mark(what string) error {
	if s.Mark == "" {
		return nil
	}
	console, err := os.OpenFile("/dev/console", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(console, "%s %s %s\n", Marker, what, s.Mark)
	return errors.Join(err, console.Close())
}

// Result is the result of one measurement. Counts are of the measured time only.
type Result struct {
	Seconds float64 // the measured time
	Bytes   uint64  // payload received (Upload: sent)
	Count   uint64  // responses (Echo, Mixed), whole connections (Churn), datagrams received (UDPPour)
	Sent    uint64  // UDPPour, Flood: datagrams sent
	Reads   uint64  // Download, SCTPDownload: read calls that returned bytes

	ByteRate, Rate        float64       // for each second
	P50, P90, P99, P999   time.Duration // of requests, or of whole connections
	Max                   time.Duration
	Slices                []float64         // Churn: connections a second, slice by slice
	Errors                map[string]uint64 // failed connections by cause; also outside of the measured time
	Relay, Client, Server time.Duration     // CPU time
	Machine               procstat.Machine  // of all cores, everything included
}

// noProgress is how long a connection may make no progress before it counts as
// failed.
const noProgress = 5 * time.Second

// Run drives the load that spec describes and returns the figures. It uses the
// whole process: the garbage collector stays off afterwards.
func Run(spec Spec) (*Result, error) {
	workers, err := newWorkers(spec)
	if err != nil {
		return nil, err
	}
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(len(workers) + 2)

	w := window{begin: now() + int64(spec.Warmup)}
	w.end = w.begin + int64(spec.Measure)
	w.slice = int64(spec.Slice)
	done := make(chan struct{}, len(workers))
	for _, worker := range workers {
		go func() {
			runtime.LockOSThread()
			worker.run(w)
			done <- struct{}{}
		}()
	}

	time.Sleep(spec.Warmup)
	before, err := takeUsage(spec)
	if err := errors.Join(err, spec.mark("begin")); err != nil {
		return nil, err
	}
	<-done // after the first one ends, the load is incomplete
	err = spec.mark("end")
	after, usageErr := takeUsage(spec)
	if err := errors.Join(err, usageErr); err != nil {
		return nil, err
	}
	for range len(workers) - 1 {
		<-done
	}

	r := &Result{
		Relay:   after.relay - before.relay,
		Client:  after.client - before.client,
		Server:  after.server - before.server,
		Machine: after.machine.Sub(before.machine),
		Errors:  map[string]uint64{},
	}
	var latency Histogram
	for _, worker := range workers {
		worker.meter().addTo(r, &latency)
	}
	r.P50, r.P90 = time.Duration(latency.Quantile(.5)), time.Duration(latency.Quantile(.9))
	r.P99, r.P999 = time.Duration(latency.Quantile(.99)), time.Duration(latency.Quantile(.999))
	r.Max = time.Duration(latency.Max())
	return r, nil
}

// worker is one loop on one thread.
type worker interface {
	run(window)
	meter() *meter
}

func newWorkers(spec Spec) ([]worker, error) {
	if len(spec.Targets) == 0 || spec.Clients < 1 || spec.Threads < 1 {
		return nil, errors.New("load: no target, client or thread")
	}
	var workers []worker
	add := func(w worker, err error) error {
		if err == nil {
			workers = append(workers, w)
		}
		return err
	}
	for _, n := range split(spec.Clients, spec.Threads) {
		var err error
		switch spec.Kind {
		case Download:
			err = add(newStreamer(spec.targets(PortSource), n, false))
		case Upload:
			err = add(newStreamer(spec.targets(PortSink), n, true))
		case Echo:
			err = add(newEchoer(spec.targets(PortEcho), n, MessageSize))
		case Churn:
			err = add(newChurner(spec, n))
		case SCTPEcho:
			err = add(newEchoer(spec.targets(PortEcho).overSCTP(), n, spec.Size))
		case SCTPDownload:
			err = add(newStreamer(spec.targets(PortSource).overSCTP().withWindow(spec.Window), n, false))
		case UDPEcho, UDPFresh:
			err = add(newAsker(spec, n, spec.Kind == UDPFresh))
		case UDPPour:
			err = add(newPourer(spec))
		case Mixed:
			err = add(newEchoer(spec.targets(PortAside), n, MessageSize))
		default:
			err = fmt.Errorf("load: unknown kind %q", spec.Kind)
		}
		if err != nil {
			return nil, err
		}
	}
	if spec.Flood > 0 {
		if err := add(newFlooder(spec)); err != nil {
			return nil, err
		}
	}
	if spec.Kind == Mixed {
		for _, n := range split(spec.Beside, spec.Threads) {
			if err := add(newStreamer(spec.targets(PortSource), n, false)); err != nil {
				return nil, err
			}
		}
	}
	return workers, nil
}

// split divides n connections among at most the given number of threads.
func split(n, threads int) []int {
	threads = min(n, threads)
	var parts []int
	for i := range threads {
		parts = append(parts, (n+i)/threads)
	}
	return parts
}

// targets returns the targets' addresses at a port.
func (s Spec) targets(port uint16) *rotation {
	r := &rotation{}
	for _, a := range s.Targets {
		r.addrs = append(r.addrs, newSockaddr(netip.AddrPortFrom(a, port)))
	}
	return r
}

// overSCTP returns the addresses for SCTP.
func (r *rotation) overSCTP() *rotation {
	for _, a := range r.addrs {
		a.overSCTP()
	}
	return r
}

// withWindow sets SO_RCVBUF of the sockets that connect; 0 for the kernel's.
func (r *rotation) withWindow(bytes int) *rotation {
	for _, a := range r.addrs {
		a.receiveBuffer = bytes
	}
	return r
}

func (s Spec) sources() *rotation {
	r := &rotation{}
	for _, a := range s.Sources {
		r.addrs = append(r.addrs, newSockaddr(netip.AddrPortFrom(a, 0)))
	}
	return r
}

// rotation returns its addresses in turn; nil if it has none.
type rotation struct {
	addrs []*sockaddr
	i     int
}

func (r *rotation) next() *sockaddr {
	if len(r.addrs) == 0 {
		return nil
	}
	r.i++
	return r.addrs[r.i%len(r.addrs)]
}

// window is the measured time, on the clock of now.
type window struct{ begin, end, slice int64 }

// meter counts what one worker did in the window. It belongs to its worker until
// the worker has ended.
type meter struct {
	window  window
	start   int64 // the first reading of the clock in the window; 0 before
	stop    int64 // the first reading after it
	bytes   uint64
	count   uint64
	sent    uint64
	reads   uint64
	latency Histogram
	slices  []uint64
	errors  map[string]uint64
}

func (m *meter) open(w window) {
	m.window = w
	m.errors = map[string]uint64{}
	if w.slice > 0 {
		m.slices = make([]uint64, (w.end-w.begin)/w.slice)
	}
}

// tick reads the clock and tells whether to go on.
func (m *meter) tick(t int64) bool {
	if m.start == 0 && t >= m.window.begin {
		m.start = t
		m.bytes, m.count, m.sent, m.reads = 0, 0, 0, 0
		m.latency.Reset()
	}
	if t >= m.window.end {
		m.stop = t
		return false
	}
	return true
}

// done counts one response or connection that began at from.
func (m *meter) done(t, from int64) {
	m.count++
	m.latency.Record(t - from)
	if len(m.slices) > 0 && m.start != 0 {
		if i := (t - m.start) / m.window.slice; i < int64(len(m.slices)) {
			m.slices[i]++
		}
	}
}

func (m *meter) failed(cause string) { m.errors[cause]++ }

func (m *meter) addTo(r *Result, latency *Histogram) {
	for cause, n := range m.errors {
		r.Errors[cause] += n
	}
	seconds := time.Duration(m.stop - m.start).Seconds()
	if m.start == 0 || seconds <= 0 {
		return
	}
	r.Seconds = max(r.Seconds, seconds)
	r.Bytes += m.bytes
	r.Count += m.count
	r.Sent += m.sent
	r.Reads += m.reads
	r.ByteRate += float64(m.bytes) / seconds
	r.Rate += float64(m.count) / seconds
	latency.Merge(&m.latency)
	for i, n := range m.slices {
		if i == len(r.Slices) {
			r.Slices = append(r.Slices, 0)
		}
		r.Slices[i] += float64(n) / time.Duration(m.window.slice).Seconds()
	}
}

type usage struct {
	relay, client, server time.Duration
	machine               procstat.Machine
}

func takeUsage(spec Spec) (u usage, err error) {
	if u.relay, err = procstat.CPU(spec.RelayPIDs); err != nil {
		return u, fmt.Errorf("relay's processor time: %w", err)
	}
	if u.server, err = procstat.CPU(spec.ServerPIDs); err != nil {
		return u, fmt.Errorf("server's processor time: %w", err)
	}
	if u.client, err = procstat.CPU([]int{os.Getpid()}); err != nil {
		return u, fmt.Errorf("own processor time: %w", err)
	}
	u.machine, err = procstat.ReadMachine()
	return u, err
}

// connected dials and waits until the connection is established.
func connected(target *sockaddr) (int, error) {
	fd, errno := dial(target, nil)
	if errno != 0 {
		return -1, fmt.Errorf("connect: %w", errno)
	}
	for deadline := now() + int64(noProgress); ; {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(ready, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			closeFD(fd)
			return -1, fmt.Errorf("poll: %w", err)
		}
		if n > 0 {
			break
		}
		if now() > deadline {
			closeFD(fd)
			return -1, errors.New("connect: timed out")
		}
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code != 0 {
		err = unix.Errno(code)
	}
	if err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}
