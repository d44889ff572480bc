package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// hold opens n connections to an endpoint and keeps them open until the test ends.
func hold(t *testing.T, from *netns.Host, address string, n int) []net.Conn {
	t.Helper()
	var list []net.Conn
	for range n {
		c := from.Connect(t, "tcp", address)
		must.OK(t, must.Err(netns.AskOn(c)))
		list = append(list, c)
	}
	return list
}

// alive expects each connection to echo.
func alive(t *testing.T, list []net.Conn) {
	t.Helper()
	for _, c := range list {
		check.OKf(t, echoes(c), "%s", c.LocalAddr())
	}
}

// echoes expects a connection to return what is sent.
func echoes(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(startTimeout))
	if _, err := io.WriteString(c, "x"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// refusedHere reports whether a connection ended as those that the kernel forwards do at a limit: reset in
// the handshake.
func refusedHere(err error) bool { return forwarded() && errors.Is(err, syscall.ECONNREFUSED) }

// TestConnectionLimitOfAService fills one service. Other services must not be
// affected.
func TestConnectionLimitOfAService(t *testing.T) {
	t.Parallel()
	const limit = 8
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	web := webOn(lab)
	other := web
	other.name, other.vips = "other", []string{"10.96.0.11", "fd00:96::11"}
	p := startProxy(t, lab, []webService{web, other}, "--max-connections-per-service", strconv.Itoa(limit))

	target := addresses(80, vip4)[0]
	held := hold(t, lab.Client, target, limit)
	c, err := lab.Client.Dial("tcp", target)
	if err == nil {
		err = ended(c)
		c.Close()
	}
	if !isReset(err) && !refusedHere(err) {
		t.Errorf("one connection more than the limit ended with %v, want a reset", err)
	}
	check.OKf(t, must.Err(lab.Client.Ask("tcp", addresses(80, other.vips...)[0])), "another service")
	alive(t, held)
	held[0].Close()
	wait.For(t, "the place of one that ended is free", startTimeout, func() error {
		_, err := lab.Client.Ask("tcp", target)
		return err
	})
	alive(t, held[1:])
	p.stop()
	limited := 0
	for _, r := range p.records() {
		if r.End == "limit" {
			limited++
		}
	}
	if limited == 0 {
		t.Error("no record ends with limit")
	}
}

// TestConnectionLimitOfANamespace fills a namespace by one of its Services. The
// namespace's other Service then gets no connection.
func TestConnectionLimitOfANamespace(t *testing.T) {
	t.Parallel()
	const limit = 8
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	web := webOn(lab)
	other := web
	other.name, other.vips = "other", []string{"10.96.0.11", "fd00:96::11"}
	p := startProxy(t, lab, []webService{web, other}, "--max-connections-per-namespace", strconv.Itoa(limit))
	held := hold(t, lab.Client, addresses(80, vip4)[0], limit)
	for _, target := range addresses(80, other.vips...) {
		if v := ask(lab.Client, target); !isReset(v.err) && !refusedHere(v.err) {
			t.Errorf("%s: %v, want a reset", target, v.err)
		}
	}
	alive(t, held)
	held[0].Close()
	wait.For(t, "the place of one that ended is free", startTimeout, func() error {
		return ask(lab.Client, addresses(80, other.vips...)[1]).err
	})
	p.stop()
	limited := 0
	for _, r := range p.records() {
		if r.End == "namespace_limit" {
			limited++
		}
	}
	if limited < 2 {
		t.Errorf("%d records end with namespace_limit", limited)
	}
	if !p.stderr.Contains("Namespace default") {
		t.Error("the log does not name the namespace")
	}
}

// leanEcho serves like netns.Host.EchoTCP with one descriptor for each connection;
// io.Copy holds three.
func leanEcho(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	h.ServeTCP(t, fmt.Sprintf(":%d", port), func(c *net.TCPConn) {
		answer := []byte(h.Name() + "\n")
		for {
			if _, err := c.Write(answer); err != nil {
				return
			}
			answer = make([]byte, 64)
			n, err := c.Read(answer)
			if err != nil {
				return
			}
			answer = answer[:n]
		}
	})
}

// TestConnectionLimitOfAll fills the whole proxy. Open connections continue;
// further ones wait and are served later.
func TestConnectionLimitOfAll(t *testing.T) {
	t.Parallel()
	limit := 200
	if full() {
		limit = 9000
	}
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		leanEcho(t, b, 8080)
	}
	p := startProxy(t, lab, []webService{webOn(lab)}, "--max-connections", strconv.Itoa(limit), "--max-connections-per-service", strconv.Itoa(limit))
	p.relayed = "connections that wait at the limit of all"
	before := p.settle(nil)
	targets := addresses(80, vip4, vip6)
	held := make([]net.Conn, limit)
	for _, v := range crowd(limit, 16, func(i int) (v visit) {
		if held[i], v.err = lab.Client.Dial("tcp", targets[i%2]); v.err == nil {
			v.name, v.err = netns.AskOn(held[i])
		}
		return v
	}) {
		if v.err != nil {
			t.Fatal(v.err)
		}
	}
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	answers := make(chan error, 10)
	for range cap(answers) {
		c := must.Get(lab.Client.Dial("tcp", targets[0]))(t)
		go func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(talkTimeout))
			_, err := netns.AskOn(c)
			answers <- err
		}()
	}
	p.awaitMetrics("it pauses at the limit", func(m map[string]float64) bool { return m[metricPauses] != 0 && m[metricOpen] == float64(limit) })
	alive(t, held)
	if len(answers) > 0 {
		t.Fatal("more connections than the limit were served")
	}
	const leave = 16 // the proxy goes on without waiting for a sixteenth of room
	for _, c := range held[:limit/leave] {
		c.Close()
	}
	for range cap(answers) {
		check.OKf(t, <-answers, "a connection that had to wait")
	}
	alive(t, held[limit/leave:])
	for _, c := range held {
		c.Close()
	}
	t.Logf("%d connections: %v", limit, p.settle(&before))
	p.stop()
}

// TestPromise8_DeadServiceSlowsNoOther floods a service whose endpoints drop, so
// that as many of its connections as allowed wait for them. Meanwhile another
// service must answer all its clients. The test compares order, not times: every
// client of the other service must be served before the first of the flood.
func TestPromise8_DeadServiceSlowsNoOther(t *testing.T) {
	const flood, others = 300, 500
	lab := netns.NewLab(t, 2)
	swallow(t, lab.Backends[0], 8080)
	lab.Backends[1].EchoTCP(t, 8080)
	dead := webService{name: "dead", vips: []string{vip4, vip6}, port: 80, endpoints: on(8080, lab.Backends[0])}
	live := webService{name: "live", vips: []string{"10.96.0.11", "fd00:96::11"}, port: 80, endpoints: on(8080, lab.Backends[1])}
	p := startProxy(t, lab, []webService{dead, live}, "--max-dialing-per-service", "64", "--dial-timeouts", "30s,30s")

	over := make(chan error, flood)
	var waiting []net.Conn
	for range flood {
		c := must.Get(lab.Client.Dial("tcp", addresses(80, vip4)[0]))(t)
		waiting = append(waiting, c)
		go func() {
			_, err := io.Copy(io.Discard, c)
			over <- err
		}()
	}
	targets := addresses(80, live.vips...)
	for _, v := range crowdUntilOneFails(others, 16, func(i int) visit { return ask(lab.Client, targets[i%2]) }) {
		if v.err != nil {
			t.Errorf("%s: %v", v.client, v.err)
		}
	}
	if len(over) > 0 {
		t.Fatalf("%d connections of the flood ended before the others were through: it proves nothing", len(over))
	}
	for _, c := range waiting {
		c.Close()
	}
	p.stop()
	for _, r := range p.records() {
		if r.Service == "default/live:http" && r.Attempts != 1 {
			t.Errorf("%s: %d attempts", r.Client, r.Attempts)
		}
	}
}

// TestDescriptorsRunOut takes away the proxy's descriptors while connections are
// open. Those continue, new ones wait, and nothing spins; when descriptors are
// available again, new connections are served.
func TestDescriptorsRunOut(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	target := addresses(80, vip4)[0]
	held := hold(t, lab.Client, target, 8)

	var was unix.Rlimit
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &was))
	set := func(soft uint64) {
		t.Helper()
		must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: soft, Max: was.Max}, nil))
	}
	scraper := p.scraper()
	defer scraper.CloseIdleConnections()
	pauses := func() int {
		t.Helper()
		m := must.Get(scrape(scraper))(t)
		return int(m[metricPauses])
	}
	before := pauses()
	set(uint64(p.descriptors()))
	const waiting = 20
	answers := make(chan error, waiting)
	for range waiting {
		c := lab.Client.Connect(t, "tcp", target)
		go func() {
			_ = c.SetDeadline(time.Now().Add(startTimeout))
			_, err := netns.AskOn(c)
			answers <- err
		}()
	}
	wait.Until(t, "it pauses", startTimeout, func() bool { return pauses() != before })
	alive(t, held)
	// Pauses grow from 5 ms to 1 s: each event loop retries at most ten times in
	// any second.
	paused := pauses()
	spent, window := p.cpu(), time.Now() // of nothing but its pauses: under the race detector, metrics take a tenth of a second
	wait.Until(t, "a second passes", startTimeout, func() bool { return time.Since(window) >= time.Second })
	used, took := p.cpu()-spent, time.Since(window)
	if used > took/4 {
		t.Errorf("used %v of CPU in %v while it could accept nothing", used, took)
	}
	if n := pauses() - paused; float64(n) > 20*float64(runtime.NumCPU())*took.Seconds() {
		t.Errorf("%d pauses in %v", n, took)
	}
	alive(t, held)

	set(was.Cur)
	failed := 0
	for range waiting {
		if err := <-answers; err != nil {
			failed++
			if !isReset(err) {
				t.Errorf("a connection that had to wait: %v", err)
			}
		}
	}
	wait.For(t, "it serves again", startTimeout, func() error {
		_, err := lab.Client.Ask("tcp", target)
		return err
	})
	alive(t, held)
	p.stop()
	// The connections in the accept queue were served. Those that got the last
	// descriptors, so that none was left for their endpoint's socket, may have
	// been given up. Their records must not blame the endpoint.
	blamed := 0
	for _, r := range p.records() {
		if r.End != "connect_failed" {
			continue
		}
		blamed++
		for _, a := range r.Failed {
			check.Equalf(t, a.Error, "no_resources", "%s: %s is blamed for", r.Client, a.Endpoint)
		}
	}
	if blamed != failed || failed > waiting/2 {
		t.Errorf("%d of %d connections that had to wait failed, %d records say so", failed, waiting, blamed)
	}
}

// cpu returns the proxy's CPU time.
func (p *proxy) cpu() time.Duration {
	p.t.Helper()
	stat := must.Read(p.t, fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	// The command's name is in parentheses and may contain spaces.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	const utime, stime, ticksPerSecond = 14 - 3, 15 - 3, 100
	user, err1 := strconv.Atoi(fields[utime])
	system, err2 := strconv.Atoi(fields[stime])
	must.OK(p.t, errors.Join(err1, err2))
	return time.Duration(user+system) * time.Second / ticksPerSecond
}
