package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// record is a line of the access log, as docs/connection-log.md describes it.
type record struct {
	Time          time.Time      `json:"time"`
	Protocol      string         `json:"protocol"`
	Path          string         `json:"path"`
	Client        netip.AddrPort `json:"client"`
	ClientNode    string         `json:"client_node"`
	Via           netip.AddrPort `json:"via"`
	VIP           netip.AddrPort `json:"vip"`
	VIPKind       string         `json:"vip_kind"`
	Service       string         `json:"service"`
	Endpoint      netip.AddrPort `json:"endpoint"`
	Pod           string         `json:"pod"`
	Node          string         `json:"node"`
	Zone          string         `json:"zone"`
	Source        string         `json:"source"`
	SourceAddress netip.AddrPort `json:"source_address"`
	Affinity      string         `json:"affinity"`
	Attempts      int            `json:"attempts"`
	Failed        []struct {
		Endpoint netip.AddrPort `json:"endpoint"`
		Pod      string         `json:"pod"`
		Error    string         `json:"error"`
		US       int64          `json:"us"`
	} `json:"failed_attempts"`
	WaitedUS    int64  `json:"waited_us"`
	ConnectUS   *int64 `json:"connect_us"`
	FirstByteUS *int64 `json:"first_byte_us"`
	DurationUS  int64  `json:"duration_us"`
	BytesUp     uint64 `json:"bytes_from_client"`
	BytesDown   uint64 `json:"bytes_from_endpoint"`
	End         string `json:"end"`
}

// wantDeadEndpoint expects the attempts to name the dead endpoint, and another
// endpoint to have answered.
func (r record) wantDeadEndpoint(t *testing.T, dead *netns.Host, blackHole bool) {
	t.Helper()
	want := "refused"
	if blackHole {
		want = "timeout"
	}
	check.Equalf(t, r.Attempts, len(r.Failed)+1, "%s: attempts, %d of them failed", r.Client, len(r.Failed))
	for _, a := range r.Failed {
		at := a.Endpoint.Addr()
		if a.Error != want || (at != dead.IPv4 && at != dead.IPv6) {
			t.Errorf("%s: attempt at %s: %s, want %s at %s", r.Client, a.Endpoint, a.Error, want, dead.Name())
		}
		if blackHole && a.US < firstTimeout.Microseconds() {
			t.Errorf("%s: the attempt was given up after %d us", r.Client, a.US)
		}
	}
	if at := r.Endpoint.Addr(); at == dead.IPv4 || at == dead.IPv6 {
		t.Errorf("%s: %s answered, which is dead", r.Client, r.Endpoint)
	}
}

// records reads the access log.
func (p *proxy) records() []record {
	p.t.Helper()
	return must.Get(readRecords(p.accessLog))(p.t)
}

// awaitRecords waits until the access log holds n records.
func (p *proxy) awaitRecords(n int) []record {
	p.t.Helper()
	var list []record
	wait.For(p.t, fmt.Sprintf("%d records", n), stopTimeout, func() (err error) {
		text, err := os.ReadFile(p.accessLog)
		if lines := bytes.Count(text, []byte("\n")); err == nil && lines < n {
			err = fmt.Errorf("%d so far", lines)
		}
		if err == nil {
			list, err = readRecords(p.accessLog)
		}
		return err
	})
	check.Equalf(p.t, len(list), n, "records")
	return list
}

// wantEnds expects the records to have these ends, in any order.
func (p *proxy) wantEnds(t *testing.T, want ...string) []record {
	t.Helper()
	list := p.records()
	var got []string
	for _, r := range list {
		got = append(got, r.End)
	}
	slices.Sort(got)
	slices.Sort(want)
	check.EqualSlicesf(t, got, want, "the records end with")
	return list
}

func readRecords(file string) ([]record, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var list []record
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%s: %w in %q", file, err, lines.Text())
		}
		list = append(list, r)
	}
	return list, lines.Err()
}

// index finds records by client. A client's port may come again for another destination,
// as the kernel assigns ports at random: only both together have one record.
func index(t *testing.T, records []record) map[netip.AddrPort]record {
	t.Helper()
	type way struct{ client, vip netip.AddrPort }
	seen := make(map[way]bool, len(records))
	m := make(map[netip.AddrPort]record, len(records))
	for _, r := range records {
		if w := (way{r.Client, r.VIP}); seen[w] {
			t.Errorf("%s to %s has two records", r.Client, r.VIP)
		} else {
			seen[w] = true
		}
		m[r.Client] = r
	}
	return m
}

// TestRecordJoinsTheEndpointsLog expects each record to have the address and port
// that the endpoint saw, over TCP and UDP.
func TestRecordJoinsTheEndpointsLog(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		for _, network := range m.networks() {
			t.Run(network, func(t *testing.T) {
				w := newWorld(t, network, []row{{name: "both", endpoints: "here there"}, {name: "local", endpoints: "here", external: "Local"}})
				p := w.proxy(t, m)
				p.start(decisionFlags()...)
				type talk struct{ client, vip netip.AddrPort }
				seen := map[talk]string{}
				for _, o := range w.services {
					for _, kind := range []string{clusterIP, loadBalancerIP} {
						for _, to := range o.at(kind) {
							for _, c := range w.clients {
								own, peer := w.seenAs(t, c, to)
								seen[talk{own, to}] = peer
							}
						}
					}
				}
				p.stop()
				for _, r := range p.records() {
					check.Equalf(t, r.SourceAddress.String(), seen[talk{r.Client, r.VIP}], "%s to %s of %s: whom the record names, as the endpoint saw it", r.Client, r.VIP, r.Service)
					delete(seen, talk{r.Client, r.VIP})
				}
				check.Equalf(t, len(seen), 0, "connections without a record")
			})
		}
	})
}

// seenAs asks a server, and returns the client's address and what the server saw.
func (w *world) seenAs(t *testing.T, c client, to netip.AddrPort) (own netip.AddrPort, peer string) {
	t.Helper()
	conn, err := c.Dialer(c.dialer(w.network, to, startTimeout), w.network, to.String())
	must.OKf(t, err, "%s to %s", c.name, to)
	defer conn.Close()
	var said string
	if w.network == "udp" {
		said, err = exchange(conn, "hello", startTimeout)
	} else {
		said, err = netns.AskOn(conn)
	}
	must.OKf(t, err, "%s to %s", c.name, to)
	said, _, _ = strings.Cut(said, "\n")
	_, peer, _ = strings.Cut(said, " ")
	return netip.MustParseAddrPort(conn.LocalAddr().String()), peer
}
