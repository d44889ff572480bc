package e2e

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestManyOpenFlows opens many connections at once that the kernel forwards, asks on each,
// and measures new ones beside them, memory, and how long the next process takes to adopt
// them. SLUICE_TEST_FLOWS is how many; `make bench-flows` opens 250,000.
func TestManyOpenFlows(t *testing.T) {
	size, beside, atOnce := 2000, 500, 64
	if text := os.Getenv("SLUICE_TEST_FLOWS"); text != "" {
		var err error
		if size, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	for _, masquerade := range []bool{false, true} {
		t.Run(fmt.Sprintf("masquerade=%t", masquerade), func(t *testing.T) {
			lab := netns.NewLab(t, 0)
			vips := []netip.Addr{netip.MustParseAddr("10.96.1.1"), netip.MustParseAddr("10.96.1.2"), netip.MustParseAddr("10.96.1.3")}
			c := newPacketClients(t, lab.Node, size+2*beside, vips...)
			p := newProxy(t, lab.Node)
			for i, vip := range vips { // the node has 8,976 ports to each endpoint
				p.apply(webService{name: fmt.Sprintf("s%d", i), vips: []string{vip.String()}, port: 80, endpoints: endpointsOf(100)})
			}
			flags := []string{"--datapath", "kernel", "--max-flows", strconv.Itoa(size + 2*beside), fmt.Sprintf("--masquerade-all=%t", masquerade)}
			p.start(flags...)
			say := func(format string, args ...any) { t.Helper(); t.Logf(format, args...) }

			// The first connections find an empty table.
			c.each(0, beside, 1, greeting)
			p50, p99 := c.times(0, beside)
			say("new connections, none beside them: p50 %v, p99 %v", p50, p99)

			before := p.holds()
			began := time.Now()
			c.each(beside, size, atOnce, greeting)
			say("%d connections in %v", size, time.Since(began).Round(time.Millisecond))
			p.wantFlows(size)
			began = time.Now()
			c.each(0, size, atOnce, asking)
			p50, p99 = c.times(0, size)
			say("a request on each in %v: p50 %v, p99 %v", time.Since(began).Round(time.Millisecond), p50, p99)
			after := p.holds()
			n := size - beside
			say("memory of each: %d B of the process, %d B of the kernel's maps as they say; %d MiB of the maps were there before",
				(after.process-before.process)/n, (after.maps-before.maps)/n, before.maps>>20)

			began = time.Now()
			out, err := sluice(t, lab, "conns", "-o", "json", "state=open")
			if got := strings.Count(out, "\n"); err != nil || got != size {
				t.Errorf("conns lists %d of %d connections: %v", got, size, err)
			}
			all := time.Since(began)
			began = time.Now()
			check.OK(t, must.Err(sluice(t, lab, "conns", "--sort=-bytes", "--limit=20", "service=default/s1")))
			say("conns: all in %v, the largest 20 of a Service in %v", all.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))

			c.each(size, size+beside, 1, greeting)
			p50, p99 = c.times(size, size+beside)
			say("new connections beside them: p50 %v, p99 %v", p50, p99)

			p.kill()
			c.each(0, size, atOnce, asking) // nobody is missed
			began = time.Now()
			p.start(flags...)
			p.wantFlows(size + beside)
			say("adopted %v after the start: %s", time.Since(began).Round(time.Millisecond), p.said("adopted what an earlier process forwarded"))
			c.each(0, size, atOnce, asking)
			c.each(size+beside, size+2*beside, 1, greeting)
			p50, p99 = c.times(size+beside, size+2*beside)
			say("new connections after that: p50 %v, p99 %v", p50, p99)
			c.mu.Lock()
			if c.strange > 0 {
				t.Errorf("%d packets that nobody expects, the first is %s", c.strange, c.oddity)
			}
			c.mu.Unlock()
			took := time.Now()
			p.stop()
			say("stopped in %v", time.Since(took).Round(time.Millisecond))
			check.Equalf(t, p.countLines(), size+2*beside, "records")
		})
	}
}

// wantFlows waits until the kernel forwards n connections.
func (p *proxy) wantFlows(n int) {
	p.t.Helper()
	p.awaitMetrics(fmt.Sprintf("%d flows", n), func(m map[string]float64) bool { return int(m["sluice_flows"]) == n })
}

// said is a line of the proxy's output.
func (p *proxy) said(what string) string {
	for line := range strings.Lines(p.stderr.String()) {
		if strings.Contains(line, what) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// countLines counts the lines of the access log.
func (p *proxy) countLines() (n int) {
	p.t.Helper()
	f := must.Get(os.Open(p.accessLog))(p.t)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		n++
	}
	return n
}

// holding is what memory a proxy holds, in bytes.
type holding struct{ process, maps int }

// holds returns the memory of the process, and of its BPF maps as the kernel states it.
func (p *proxy) holds() holding {
	p.t.Helper()
	return holding{p.memory(), int(procstat.Maps(p.cmd.Process.Pid))}
}
