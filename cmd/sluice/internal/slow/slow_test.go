package slow

import (
	"reflect"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
)

// row has the figures of an endpoint in milliseconds.
func row(service, endpoint string, connect50, connect99, first50, first99 int64) api.Rates {
	return api.Rates{
		Service: service, Protocol: "TCP", Endpoint: endpoint,
		ConnectP50US: connect50 * 1000, ConnectP99US: connect99 * 1000, FirstP50US: first50 * 1000, FirstP99US: first99 * 1000,
	}
}

// silent is an endpoint that answered some connections, while some ended unanswered and
// some wait, for so many milliseconds.
func silent(service, endpoint string, answered, unanswered float64, waiting int, ms int64) api.Rates {
	r := row(service, endpoint, 1, 1, 0, 0)
	if answered > 0 {
		r = row(service, endpoint, 1, 1, 10, 20)
	}
	r.Answered, r.Unanswered, r.Waiting, r.UnansweredUS = answered, unanswered, waiting, ms*1000
	return r
}

func TestFind(t *testing.T) {
	for _, c := range []struct {
		name            string
		rows            []api.Rates
		want            []string // the endpoint, and what is late
		compared, alone int
	}{
		{"even", []api.Rates{row("a", "1", 1, 1, 10, 20), row("a", "2", 1, 1, 12, 30), row("a", "3", 1, 1, 9, 25)}, nil, 3, 0},
		{"a slow program", []api.Rates{row("a", "1", 1, 1, 10, 20), row("a", "2", 1, 1, 400, 410), row("a", "3", 1, 1, 9, 25)}, []string{"2 answer"}, 3, 0},
		{"a slow handshake", []api.Rates{row("a", "1", 1, 1, 10, 20), row("a", "2", 200, 300, 210, 320)}, []string{"2 handshake"}, 2, 0},
		{"a slow tail", []api.Rates{row("a", "1", 1, 1, 10, 20), row("a", "2", 1, 2, 11, 500)}, []string{"2 answer"}, 2, 0},
		{"lost SYNs", []api.Rates{row("a", "1", 1, 1, 10, 20), row("a", "2", 1, 1000, 11, 1010)}, []string{"2 handshake"}, 2, 0},
		{"the slowest first", []api.Rates{
			row("a", "1", 1, 1, 10, 10), row("a", "2", 1, 1, 50, 50), row("a", "3", 1, 1, 90, 90), row("a", "4", 1, 1, 10, 10), row("a", "5", 1, 1, 10, 10),
		}, []string{"3 answer", "2 answer"}, 5, 0},
		{"all are fast enough", []api.Rates{row("a", "1", 1, 1, 1, 1), row("a", "2", 1, 1, 5, 6)}, nil, 2, 0},
		{"nobody to compare with", []api.Rates{row("a", "1", 1, 1, 900, 900), row("b", "2", 1, 1, 1, 1)}, nil, 0, 2},
		{"an endpoint without requests", []api.Rates{row("a", "1", 1, 1, 900, 900), row("a", "2", 1, 1, 0, 0)}, nil, 0, 1},
		{"no answer", []api.Rates{row("a", "1", 1, 1, 10, 20), silent("a", "2", 0, 0, 3, 900), row("a", "3", 1, 1, 10, 400)}, []string{"2 no answer", "3 answer"}, 3, 0},
		{"clients gave up", []api.Rates{row("a", "1", 1, 1, 10, 20), silent("a", "2", 1, 4, 0, 900)}, []string{"2 no answer"}, 2, 0},
		{"some clients gave up", []api.Rates{row("a", "1", 1, 1, 10, 20), silent("a", "2", 4, 1, 2, 900)}, nil, 2, 0},
		{"the answer is not due yet", []api.Rates{row("a", "1", 1, 1, 10, 300), silent("a", "2", 0, 0, 3, 900)}, nil, 2, 0},
		{"nobody answers", []api.Rates{silent("a", "1", 0, 0, 3, 900), silent("a", "2", 0, 0, 3, 900)}, nil, 0, 2},
	} {
		found := Find(c.rows)
		var got []string
		for _, e := range found.Slow {
			got = append(got, e.Endpoint+" "+e.Late)
		}
		if !reflect.DeepEqual(got, c.want) || found.Compared != c.compared || found.Alone != c.alone {
			t.Errorf("%s: %q, %d compared, %d alone; want %q, %d, %d", c.name, got, found.Compared, found.Alone, c.want, c.compared, c.alone)
		}
	}
}
