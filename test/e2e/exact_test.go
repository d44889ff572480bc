package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestLimitsAreExactOnBothPaths opens more connections at once than a limit allows, from many
// sockets: as many as the limit are served, the others get the limit's answer, and each leaves one
// record. For each one that ends, one more is served.
func TestLimitsAreExactOnBothPaths(t *testing.T) {
	const limit, beyond, freed = 20, 40, 5
	for _, path := range []string{"relay", "kernel"} {
		for _, c := range []struct {
			name, end  string
			annotation string
			flags      []string
		}{
			{name: "Service", end: "limit", flags: []string{"--max-connections-per-service", fmt.Sprint(limit)}},
			{name: "namespace", end: "namespace_limit", flags: []string{"--max-connections-per-namespace", fmt.Sprint(limit), "--max-connections-per-service", "1000"}},
			{name: "Service's annotation", end: "limit", annotation: fmt.Sprintf("sluice.dev/max-connections: '%d'", limit)},
			{name: "endpoint's annotation", end: "limit", annotation: fmt.Sprintf("sluice.dev/max-connections-per-endpoint: '%d'", limit/2)},
			{name: "all", flags: []string{"--max-connections", fmt.Sprint(limit), "--max-connections-per-namespace", fmt.Sprint(limit), "--max-connections-per-service", fmt.Sprint(limit)}},
		} {
			t.Run(path+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				lab := netns.NewLab(t, 2)
				lab.EchoTCP(t, 8080)
				p := newProxy(t, lab.Node)
				web := webService{name: "web", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends...)}
				p.write("web.yaml", web.annotated(c.annotation))
				p.start(append([]string{"--datapath", path}, c.flags...)...)

				first := rushOf(lab.Client, limit+beyond)
				if c.end == "" { // the others wait
					first.await(t, limit, 0)
					alive(t, first.held())
					for n, places := limit, freed; n < limit+beyond; places = limit {
						first.close(places)
						n = min(n+places, limit+beyond)
						first.await(t, n, 0)
						alive(t, first.held())
					}
					first.close(limit)
				} else {
					first.await(t, limit, beyond)
					first.close(freed)
					wait.For(t, "the records of those that ended", startTimeout, func() error {
						list, err := readRecords(p.accessLog)
						if got := count(list, func(r record) bool { return r.End == "client_fin" }); err == nil && got < freed {
							err = fmt.Errorf("%d of %d", got, freed)
						}
						return err
					})
					next := rushOf(lab.Client, beyond)
					next.await(t, freed, beyond-freed)
					alive(t, first.held())
					first.close(limit)
					next.close(freed)
				}
				p.stop()

				records, clients := p.records(), make(map[netip.AddrPort]int)
				for _, r := range records {
					if clients[r.Client]++; clients[r.Client] > 1 {
						t.Errorf("%s has another record: %+v", r.Client, r)
					}
				}
				all, over, here := limit+beyond, 0, limit
				if c.end != "" {
					all, over = limit+2*beyond, 2*beyond-freed
					here = all
				}
				check.Equalf(t, len(records), all, "records of %d connections", all)
				if got := count(records, func(r record) bool { return c.end != "" && r.End == c.end }); got != over {
					t.Errorf("%d records end with %s, want %d", got, c.end, over)
				}
				if got := count(records, func(r record) bool { return r.Path == path }); got < here {
					t.Errorf("%d records have the path %s, want %d", got, path, here)
				}
			})
		}
	}
}

// TestSessionLimitsAreExactOnBothPaths opens more UDP sessions at once than a limit allows: all are
// served, and each one beyond the limit ends an earlier one. Each leaves one record.
func TestSessionLimitsAreExactOnBothPaths(t *testing.T) {
	const limit, beyond = 20, 40
	for _, path := range []string{"relay", "kernel"} {
		for _, flag := range []string{"--max-udp-sessions", "--max-udp-sessions-per-service"} {
			t.Run(path+"/"+flag, func(t *testing.T) {
				t.Parallel()
				lab := netns.NewLab(t, 2)
				lab.EchoUDP(t, 9000)
				p := newProxy(t, lab.Node)
				p.put(&object{
					name: "web", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4}, port: 80, target: 9000, protocol: corev1.ProtocolUDP,
					endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}, {host: lab.Backends[1], node: "elsewhere"}},
				})
				// Each event loop of the relay has an even part of a limit.
				p.start("--datapath", path, flag, fmt.Sprint(limit), "--workers", "1", "--access-log-udp", "all")
				// Always some have their answer, so that no other one is ended.
				for _, v := range crowd(limit+beyond, limit/2, func(int) (v visit) {
					conn, err := lab.Client.Dial("udp", addresses(80, vip4)[0])
					if err != nil {
						return visit{err: err}
					}
					t.Cleanup(func() { _ = conn.Close() })
					v.name, v.err = exchange(conn, "who", talkTimeout)
					return v
				}) {
					if v.err != nil {
						t.Error(v.err)
					}
				}
				p.stop()
				clients := make(map[netip.AddrPort]int)
				records := p.records()
				for _, r := range records {
					if clients[r.Client]++; r.Path != path {
						t.Errorf("%s: the path is %s", r.Client, r.Path)
					}
				}
				if len(records) != limit+beyond || len(clients) != limit+beyond {
					t.Errorf("%d records of %d clients, want %d", len(records), len(clients), limit+beyond)
				}
				check.Equalf(t, count(records, func(r record) bool { return r.End == "evicted" }), beyond, "sessions were ended for others")
			})
		}
	}
}

func count(list []record, is func(record) bool) (n int) {
	for _, r := range list {
		if is(r) {
			n++
		}
	}
	return n
}

// rush are connections that began at once, each from a socket of its own.
type rush struct {
	mu      sync.Mutex
	served  []net.Conn // open ones, in order
	closed  int        // those that were served and are closed
	refused int        // reset, in the handshake or after it
	failed  error      // of one that ended otherwise
}

// rushOf begins n connections to port 80 of the first Service, and returns at once.
func rushOf(from *netns.Host, n int) *rush {
	r := new(rush)
	for range n {
		go func() {
			c, err := from.Dial("tcp", addresses(80, vip4)[0])
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, len("b1:8080\n")))
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			switch {
			case err == nil:
				r.served = append(r.served, c)
			case isReset(err), errors.Is(err, syscall.ECONNREFUSED):
				r.refused++
			default:
				r.failed = err
			}
		}()
	}
	return r
}

// await waits until as many connections were served and refused, and fails if it becomes more.
func (r *rush) await(t *testing.T, served, refused int) {
	t.Helper()
	wait.For(t, fmt.Sprintf("%d connections are served and %d refused", served, refused), talkTimeout, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if got := len(r.served) + r.closed; r.failed != nil || got > served || r.refused > refused {
			t.Fatalf("%d connections are served and %d refused, want %d and %d; %v", got, r.refused, served, refused, r.failed)
		} else if got < served || r.refused < refused {
			return fmt.Errorf("%d and %d", got, r.refused)
		}
		return nil
	})
}

// held returns those that are open.
func (r *rush) held() []net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.served)
}

// close closes n of those that are open, or all.
func (r *rush) close(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = min(n, len(r.served))
	for _, c := range r.served[:n] {
		_ = c.Close()
	}
	r.served = r.served[n:]
	r.closed += n
}
