package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// tenantServices is the number of Services among which the tenant spreads its
// clients.
const tenantServices = 4

// resources are the rows of the table.
func (w *tenancy) resources() []resource {
	return []resource{
		{
			name: "connections, idle", most: "31/32 of all", flag: "`--max-connections-per-namespace`",
			take: w.takeConnections,
		},
		{
			name: "connections that wait for endpoints that drop", most: "1/8 of all connections, at most 1,024, for each Service", flag: "`--max-dialing-per-service`",
			take: w.takeDialing,
		},
		{
			name: "CPU, endpoints that refuse", most: "16 attempts of a loop's round, 137 of a connection", flag: "none",
			take: w.takeAttempts,
		},
		{
			name: "sockets of node ports and external IPs", most: "as many as are left free", flag: "`--max-claims`",
			take: w.takeBoundPorts, ask: w.askNodePort,
		},
		{
			name: "UDP sessions", most: "all that others do not use", flag: "`--max-udp-sessions`",
			take: w.takeSessions, ask: w.askBySessions(),
		},
		{
			name: "kernel memory, clients that never read", most: "1.5 MiB for each connection", flag: "`--max-connections-per-namespace`",
			take: w.takeMemory,
		},
		{
			name: "log, manifests that are wrong", most: fmt.Sprintf("%d lines a minute for a namespace, and %[1]d for a file", once.PerMinute), flag: "none",
			take: w.takeLog,
		},
		{
			name: "access log, short connections", most: "what its clients open", flag: "none",
			take: w.takeRecords,
		},
	}
}

// serve gives the tenant Services with that port of its host. Port 9000 is UDP.
func (w *tenancy) serve(target uint16, services int) (targets []string) {
	w.t.Helper()
	var list []*object
	for i := range services {
		list = append(list, w.service(tenant, i, target))
		targets = append(targets, addresses(80, list[i].vips...)...)
	}
	w.have(list...)
	return targets
}

// takeConnections opens connections until they are reset, keeps them, and
// continues to try.
func (w *tenancy) takeConnections() func() string {
	targets, limit := w.serve(8080, tenantServices), w.size.connections-w.size.connections/32
	held := make([]net.Conn, limit+limit/16)
	var got atomic.Int32
	open := func(i int) (v visit) {
		var c net.Conn
		if c, v.err = w.lab.Client.Dial("tcp", targets[i%len(targets)]); v.err != nil {
			return v
		}
		if _, v.err = netns.AskOn(c); v.err != nil {
			_ = c.Close()
			return v
		}
		got.Add(1)
		held[i] = c
		return v
	}
	for _, v := range crowd(len(held), 8, open) {
		if v.err != nil && !isReset(v.err) {
			w.t.Errorf("a connection of the tenant: %v, want a reset", v.err)
		}
	}
	stop := repeatedly(5*time.Millisecond, func(i int) {
		if v := ask(w.lab.Client, targets[i%len(targets)]); !isReset(v.err) {
			w.t.Errorf("a connection beyond the limit: %v, want a reset", v.err)
		}
	})
	return func() string {
		stop()
		check.Equalf(w.t, got.Load(), int32(limit), "the tenant's connections, up to the limit of a namespace")
		said := fmt.Sprintf("%d of %d connections, %d descriptors, %d MiB of memory", got.Load(), w.size.connections, w.p.descriptors(), w.p.memory()>>20)
		cutAll(held)
		return said
	}
}

// takeDialing keeps as many connections waiting as it can, and as many again in
// the kernel's queues. Those that are given up are made again.
func (w *tenancy) takeDialing() func() string {
	targets, limit := w.serve(8081, tenantServices), w.size.dialing*tenantServices
	over := make(chan struct{})
	var clients sync.WaitGroup
	end := sync.OnceFunc(func() {
		close(over)
		clients.Wait()
	})
	w.t.Cleanup(end)
	for i := range 2 * limit {
		clients.Go(func() {
			for {
				c, err := w.lab.Client.Dial("tcp", targets[i%len(targets)])
				if errors.Is(err, syscall.ECONNRESET) { // it was accepted, and reset before this thread had a CPU
					select {
					case <-over:
						return
					default:
						continue
					}
				}
				if err != nil {
					w.t.Errorf("connection %d of the tenant: %v", i, err)
					return
				}
				ended := make(chan struct{})
				go func() {
					_, _ = io.Copy(io.Discard, c)
					close(ended)
				}()
				select {
				case <-ended:
					_ = c.Close()
				case <-over:
					cutAll([]net.Conn{c})
					<-ended
					return
				}
			}
		})
	}
	most := 0
	wait.For(w.t, "as many wait for an endpoint as may", startTimeout, func() error {
		most = max(most, int(w.metrics()[metricDialing]))
		if most < limit {
			return fmt.Errorf("%d do", most)
		}
		return nil
	})
	stop := repeatedly(20*time.Millisecond, func(int) {
		if m, err := w.p.metrics(); err == nil {
			most = max(most, int(m[metricDialing]))
		}
	})
	return func() string {
		stop()
		if over := most - limit; over > 1 { // the neighbour's own
			w.t.Errorf("%d connections of the tenant wait for an endpoint, the limit of %d Services is %d", most, tenantServices, limit)
		}
		end()
		return fmt.Sprintf("%d for each of %d Services", limit/tenantServices, tenantServices)
	}
}

// takeAttempts connects a hundred times a second to a Service whose endpoints all
// refuse.
func (w *tenancy) takeAttempts() func() string {
	w.p.settled(func() { w.p.write(tenantFile, w.refusing.yaml()) })
	target := addresses(80, w.refusing.vips...)[0]
	failures := func() int { return int(w.metrics()["sluice_dial_failures_total"]) }
	before, spent, began := failures(), w.p.cpu(), time.Now()
	var mu sync.Mutex
	var open []net.Conn // guarded by mu
	stop := repeatedly(10*time.Millisecond, func(int) {
		if c, err := w.lab.Client.Dial("tcp", target); err == nil {
			mu.Lock()
			defer mu.Unlock()
			open = append(open, c)
		}
	})
	return func() string {
		stop()
		took := time.Since(began)
		attempts, used := failures()-before, w.p.cpu()-spent
		if most := 137 * len(open); attempts > most || attempts == 0 {
			w.t.Errorf("%d attempts for %d connections, want at most %d", attempts, len(open), most)
		}
		cutAll(open)
		return fmt.Sprintf("100 connections a second to %d endpoints: %.0f attempts a second, %.0f %% of a processor",
			w.size.endpoints, float64(attempts)/took.Seconds(), 100*used.Seconds()/took.Seconds())
	}
}

// takeBoundPorts asks for twice as many node ports, and external IPs on the node's
// addresses, as there are.
func (w *tenancy) takeBoundPorts() func() string {
	const claims = "sluice_port_claims"
	before := int(w.metrics()[claims])
	// The neighbour's Service is created after the tenant's.
	w.p.settled(func() { w.p.remove(w.nodePort.name) })
	own := before - int(w.metrics()[claims])
	services := make([]*object, w.size.claims/4)
	for i := range services {
		o := w.service(tenant, i, 8080)
		o.kind, o.nodePort, o.port = "LoadBalancer", uint16(30000+i), uint16(20000+i)
		o.externalIPs = []string{w.lab.Node.IPv4.String(), w.lab.Node.IPv6.String()}
		services[i] = o
	}
	w.have(services...)
	most, got := w.size.claims/2, int(w.metrics()[claims])
	check.Equalf(w.t, got, most, "sockets that the tenant holds, of %d", w.size.claims)
	w.p.settled(func() { w.p.put(w.nodePort) })
	if n := int(w.metrics()[claims]); own == 0 || n != got+own {
		w.t.Errorf("the neighbour holds %d sockets beside the tenant, and %d without it", n-got, own)
	}
	return func() string {
		return fmt.Sprintf("%d of %d by %d Services with a node port on each address and two external IPs", got, w.size.claims, len(services))
	}
}

func (w *tenancy) askNodePort(i int) error {
	return w.connect(netip.AddrPortFrom([]netip.Addr{w.lab.Node.IPv4, w.lab.Node.IPv6}[i%2], w.nodePort.nodePort).String())
}

// takeSessions sends from twice as many clients as the limit of sessions.
func (w *tenancy) takeSessions() func() string {
	const services = 2 * tenantServices
	targets := w.serve(9000, services)
	clients := make([]net.PacketConn, 2*w.size.sessions/services)
	for i := range clients {
		var err error
		if clients[i], err = w.lab.Client.ListenPacket("udp", ":0"); err != nil {
			w.t.Fatal(err)
		}
	}
	var to []net.Addr
	for _, target := range targets {
		to = append(to, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(target)))
	}
	most, sent := 0.0, 0
	began := time.Now()
	send := repeatedly(time.Millisecond, func(int) {
		for range 5 {
			_, _ = clients[sent%len(clients)].WriteTo([]byte("x"), to[sent/len(clients)%len(to)])
			sent++
		}
	})
	wait.For(w.t, "all sessions are in use", startTimeout, func() error {
		if n := w.metrics()["sluice_udp_sessions"]; n < float64(w.size.sessions)*0.9 { // the loops' shares may differ
			return fmt.Errorf("%.0f are", n)
		}
		return nil
	})
	look := repeatedly(20*time.Millisecond, func(int) {
		if m, err := w.p.metrics(); err == nil {
			most = max(most, m["sluice_udp_sessions"])
		}
	})
	return func() string {
		look()
		send()
		took := time.Since(began)
		for _, c := range clients {
			_ = c.Close()
		}
		m := w.metrics()
		own := sumOf(m, metricOpen, `namespace="neighbour"`, `protocol="UDP"`)
		if most > float64(w.size.sessions)+8 { // each loop rounds its share up
			w.t.Errorf("%.0f sessions, the bound is %d", most, w.size.sessions)
		}
		if n := sumOf(m, "sluice_connections_closed_total", `namespace="neighbour"`, `end="evicted"`); n > 0 {
			w.t.Errorf("%.0f sessions of the neighbour made room for the tenant's", n)
		}
		return fmt.Sprintf("%.0f of %d beside the neighbour's %.0f; %.0f datagrams a second to %d Services", most-own, w.size.sessions, own, float64(sent)/took.Seconds(), services)
	}
}

// askBySessions returns requests that use a quarter of all sessions in turn, half
// of the share that each of two namespaces has.
func (w *tenancy) askBySessions() func(i int) error {
	var sessions []net.Conn
	target := addresses(80, w.dns.vips...)[0]
	return func(i int) error {
		if len(sessions) < w.size.sessions/4 {
			c, err := w.lab.Client.Dial("udp", target)
			if err != nil {
				return err
			}
			w.t.Cleanup(func() { _ = c.Close() })
			sessions = append(sessions, c)
		}
		_, err := exchange(sessions[i%len(sessions)], "x", startTimeout)
		return err
	}
}

// pour serves a port of the host: it writes for as long as the client reads.
func pour(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	h.ServeTCP(t, fmt.Sprintf(":%d", port), func(c *net.TCPConn) {
		_ = c.SetWriteBuffer(16 << 10) // the test does not measure the host's memory
		for err := error(nil); err == nil; {
			_, err = c.Write(noise()[:64<<10])
		}
	})
}

// takeMemory has clients that never read.
func (w *tenancy) takeMemory() func() string {
	targets := w.serve(8082, tenantServices)
	var clients []net.Conn
	for i := range w.size.readers {
		c := must.Get(w.lab.Client.Dial("tcp", targets[i%len(targets)]))(w.t)
		clients = append(clients, c)
	}
	held, steady := 0, 0
	wait.For(w.t, "what is held does not grow any more", talkTimeout, func() error {
		now := socketMemory(w.t, w.lab.Node)
		if steady++; now > held+held/64 {
			steady = 0
		}
		held = max(held, now)
		if steady < 5 {
			return errNotYet
		}
		return nil
	})
	return func() string {
		held = max(held, socketMemory(w.t, w.lab.Node))
		each := held / len(clients)
		if each > 3<<19 {
			w.t.Errorf("the kernel holds %d KiB for a client that reads nothing, want at most 1.5 MiB", each>>10)
		}
		cutAll(clients)
		return fmt.Sprintf("%d KiB for each of %d clients", each>>10, len(clients))
	}
}

// takeLog rewrites a manifest with another error in each of its Services.
func (w *tenancy) takeLog() func() string {
	const services = 120
	if w.loud.IsZero() {
		w.loud = time.Now()
	}
	const wrong = "169.254.0.0"
	list := make([]*object, services)
	for i := range list {
		list[i] = w.service(tenant, i, 8080)
		list[i].externalIPs = []string{wrong}
	}
	manifest := manifestOf(list)
	rewrite := func(i int) {
		w.p.write(tenantFile, strings.ReplaceAll(manifest, wrong, fmt.Sprintf("169.254.%d.%d", i/200%200, i%200)))
	}
	stop := repeatedly(20*time.Millisecond, rewrite)
	wait.For(w.t, "the problems are known", startTimeout, func() error {
		if n := w.metrics()["sluice_config_problems"]; n < services {
			return fmt.Errorf("%.0f are", n)
		}
		return nil
	})
	late := w.service("late", 3, 8080)
	w.p.put(late)
	changed := time.Now()
	wait.For(w.t, "another namespace's change is in force", startTimeout, func() error {
		c, err := w.lab.Client.Dialer(&net.Dialer{Timeout: 100 * time.Millisecond}, "tcp", addresses(late.port, late.vips...)[0])
		if err == nil {
			_, err = netns.AskOn(c)
			_ = c.Close()
		}
		return err
	})
	delay := time.Since(changed)
	return func() string {
		stop()
		w.p.settled(func() { w.p.remove(late.name) })
		lines, size := 0, 0
		for line := range strings.Lines(w.p.stderr.String()) {
			if strings.Contains(line, "169.254.") {
				lines++
				size += len(line)
			}
		}
		took := time.Since(w.loud)
		if most := 2 * once.PerMinute * (2 + int(took/time.Minute)); lines > most || lines < once.PerMinute {
			w.t.Errorf("%d lines about the tenant in %v, want %d to %d", lines, took, once.PerMinute, most)
		}
		return fmt.Sprintf("%d lines, %d KiB in %.0f s, by a manifest with something wrong in %d Services that is rewritten 50 times a second; another's change was in force after %v",
			lines, size>>10, took.Seconds(), services, delay.Round(time.Millisecond))
	}
}

// takeRecords opens and closes connections, by four clients at once.
func (w *tenancy) takeRecords() func() string {
	targets := w.serve(8080, tenantServices)
	size := func() int64 {
		info := must.Get(os.Stat(w.p.accessLog))(w.t)
		return info.Size()
	}
	before, began := size(), time.Now()
	var made atomic.Int32
	var stops []func()
	for range 4 {
		stops = append(stops, repeatedly(2*time.Millisecond, func(i int) {
			if v := ask(w.lab.Client, targets[i%len(targets)]); v.err != nil {
				w.t.Errorf("a connection of the tenant: %v", v.err)
			}
			made.Add(1)
		}))
	}
	return func() string {
		for _, stop := range stops {
			stop()
		}
		took := time.Since(began).Seconds()
		return fmt.Sprintf("%.0f records, %.0f KiB a second; none of the neighbour's is lost", float64(made.Load())/took, float64(size()-before)/1024/took)
	}
}
