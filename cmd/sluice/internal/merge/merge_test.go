package merge

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
)

// TestOrdersOfProxies: whatever proxies sort by, their answers can be merged by.
func TestOrdersOfProxies(t *testing.T) {
	for _, name := range live.Orders() {
		if Connections(name) == nil || Connections("-"+name) == nil {
			t.Errorf("connections have no order %s", name)
		}
	}
	for _, name := range live.Ratings() {
		if Rates(name) == nil {
			t.Errorf("rates have no order %s", name)
		}
	}
	if Connections("nix") != nil || Rates("nix") != nil {
		t.Error("there is an order nix")
	}
}

// TestConnections: for each order, the first of two connections is the lesser one.
func TestConnections(t *testing.T) {
	n := func(v int64) *int64 { return &v }
	u := func(v uint64) *uint64 { return &v }
	for name, pair := range map[string][2]api.Connection{
		"id":                  {{ID: 9}, {ID: 10}},
		"duration":            {{DurationUS: 9}, {DurationUS: 10}},
		"attempts":            {{Attempts: 9}, {Attempts: 10}},
		"bytes":               {{BytesFromClient: 9}, {BytesFromClient: 5, BytesFromEndpoint: 5}},
		"bytes_from_client":   {{BytesFromEndpoint: 99}, {BytesFromClient: 1}},
		"bytes_from_endpoint": {{BytesFromClient: 99}, {BytesFromEndpoint: 1}},
		"waited":              {{}, {WaitedUS: n(1)}},
		"connect":             {{ConnectUS: n(9)}, {ConnectUS: n(10)}},
		"first_byte":          {{}, {FirstByteUS: n(1)}},
		"client":              {{Client: "10.0.0.9:1"}, {Client: "10.0.0.10:1"}},
		"vip":                 {{VIP: "10.0.0.9:1"}, {VIP: "10.0.0.10:1"}},
		"endpoint":            {{}, {Endpoint: "[fd00::1]:80"}},
		"pod":                 {{Pod: "a/a"}, {Pod: "a/b"}},
		"node":                {{Node: "a"}, {Node: "b"}},
		"service":             {{Service: "a/a"}, {Service: "a/b"}},
		"state":               {{State: "connecting"}, {State: "open"}},
		"idle":                {{}, {IdleUS: n(1)}},
		"rtt":                 {{ClientRTTUS: n(9), EndpointRTTUS: n(9)}, {EndpointRTTUS: n(10)}},
		"retransmits":         {{ClientRetransmits: u(9)}, {ClientRetransmits: u(5), EndpointRetransmits: u(5)}},
		"unacked":             {{ClientUnacked: u(9)}, {ClientUnacked: u(5), EndpointUnacked: u(5)}},
	} {
		if up, down := Connections(name)(&pair[0], &pair[1]), Connections("-"+name)(&pair[0], &pair[1]); up >= 0 || down <= 0 {
			t.Errorf("%s: %d, and reversed %d", name, up, down)
		}
	}
}

// TestList compares a List with sorting all rows at the end.
func TestList(t *testing.T) {
	type row struct{ value, came int }
	for round := range 200 {
		random := rand.New(rand.NewPCG(1, uint64(round)))
		l := List[row]{Compare: func(a, b *row) int { return cmp.Compare(a.value, b.value) }, Limit: random.IntN(20)}
		var all []row
		for range random.IntN(6) {
			var rows []row
			for range random.IntN(10) {
				rows = append(rows, row{random.IntN(10), len(all) + len(rows)})
			}
			l.Add(rows)
			all = append(all, rows...)
		}
		slices.SortStableFunc(all, func(a, b row) int { return l.Compare(&a, &b) })
		if want := all[:min(l.Limit, len(all))]; fmt.Sprint(l.Rows) != fmt.Sprint(want) {
			t.Fatalf("round %d: %v, want %v", round, l.Rows, want)
		}
	}
}
