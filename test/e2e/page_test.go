package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestProxyServesThePage asks the page of --web-bind-address: it shows connections, also
// without an admin socket, only reads, and answers to no name but loopback's and those
// that were allowed.
func TestProxyServesThePage(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--web-bind-address=:10261", "--web-allowed-hosts=node-1.example", "--admin-socket=off")
	client := p.scraper()
	ask := func(method, host, path string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://127.0.0.1:10261"+path, strings.NewReader(""))
		if err != nil {
			return nil, err
		}
		r.Host = host
		r.Header.Set("Content-Type", "application/json")
		return client.Do(r)
	}
	for _, tt := range []struct {
		method, host, path string
		status             int
		text               string
	}{
		{"GET", "localhost:9999", "/", 200, "<title>Sluice"},
		{"GET", "node-1.example", "/v1/version", 200, `"actions":false`},
		{"GET", "127.0.0.1:10261", "/v1/services", 200, "default/web"},
		{"GET", "attacker.example:10261", "/v1/version", 421, "error"},
		{"POST", "localhost", "/v1/close", 405, "only reads"},
		{"POST", "localhost", "/v1/drain", 405, "only reads"},
	} {
		resp := must.Get(ask(tt.method, tt.host, tt.path))(t)
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != tt.status || !strings.Contains(string(body), tt.text) || !strings.Contains(resp.Header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s %s by the name %s: %s %.200s %v", tt.method, tt.path, tt.host, resp.Status, body, err)
		}
	}
	if c, err := lab.Client.Dial("tcp", "10.1.0.1:10261"); err == nil {
		_ = c.Close()
		t.Error("the page is reached from another host, and was to be on loopback")
	}

	// A stream lasts, and has a connection's record when it ends.
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10261/v1/tap", http.NoBody))(t)
	resp := must.Get(client.Do(r))(t)
	defer resp.Body.Close()
	held := hold(t, lab.Client, addresses(80, vip4)[0], 1)
	from := held[0].LocalAddr().String()
	_ = held[0].Close()
	for lines := bufio.NewScanner(resp.Body); ; {
		if !lines.Scan() {
			t.Fatalf("the stream has ended: %v", lines.Err())
		}
		var got record
		must.OK(t, json.Unmarshal(lines.Bytes(), &got))
		if got.Client.String() == from {
			break
		}
	}
}
