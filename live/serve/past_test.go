package serve

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections that ended are found by filter, time and number.
func TestPast(t *testing.T) {
	s := newSite(t)
	const connections = 5
	var last *conntrack.Record
	for i := range connections {
		last = s.open(fmt.Sprintf("10.0.0.1:%d", i+1))
		s.on(func() {
			last.End, last.Duration = conntrack.ClientFin, 5000
			s.shard.Close(last)
			s.shard.Flush()
		})
	}
	// ask returns the first line, and the clients of the others.
	ask := func(query string) (first api.Connection, clients string) {
		t.Helper()
		status, body := s.get(t, "/v1/past?"+query)
		if status != http.StatusOK {
			t.Fatalf("%s: %d %s", query, status, body)
		}
		lines := strings.Split(strings.TrimSpace(body), "\n")
		if err := json.Unmarshal([]byte(lines[0]), &first); err != nil || first.Past == nil {
			t.Fatalf("%s: the first line is %s", query, lines[0])
		}
		for _, line := range lines[1:] {
			var c api.Connection
			if err := json.Unmarshal([]byte(line), &c); err != nil || c.End != "client_fin" || c.Service != "shop/web:http" || len(c.Failed) != 1 {
				t.Errorf("%s: %s", query, line)
			}
			clients += " " + strings.TrimPrefix(c.Client, "10.0.0.1:")
		}
		return first, clients
	}
	wait.True(t, "all records are kept", func() bool {
		first, _ := ask("")
		return first.Past.Kept == connections
	})
	for query, want := range map[string]string{
		"":                            " 1 2 3 4 5",
		"limit=2":                     " 4 5",
		"filter=client=10.0.0.1:2":    " 2",
		"filter=end!=client_fin":      "",
		"since=99999999999":           "",
		"since=1&filter=attempts%3E1": " 1 2 3 4 5",
	} {
		if _, got := ask(query); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	status, body := s.get(t, fmt.Sprint("/v1/connections/", last.ID))
	var c api.Connection
	if err := json.Unmarshal([]byte(body), &c); err != nil || status != http.StatusOK || c.End != "client_fin" || c.State != "" || c.Client != "10.0.0.1:5" {
		t.Errorf("the last one: %d %s", status, body)
	}
	if status, body := s.get(t, "/v1/connections/999"); status != http.StatusNotFound {
		t.Errorf("a number that nobody had: %d %s", status, body)
	}
	for _, query := range []string{"since=yesterday", "limit=-1", "filter=colour=red", "offset=1"} {
		if status, body := s.get(t, "/v1/past?"+query); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", query, status, body)
		}
	}
}

// get returns the status and the body of an answer.
func (s *site) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	resp, err := s.client.Get(s.url + path)
	must.OK(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must.OK(t, err)
	return resp.StatusCode, string(text)
}
