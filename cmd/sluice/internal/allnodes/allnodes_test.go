package allnodes

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// proxy is a played proxy of a node.
type proxy struct {
	name   string
	opened float64     // per second
	down   atomic.Bool // it does not answer
	older  atomic.Bool // its build lets no rows out
	asked  chan string // what it was asked, if it is not full
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if p.down.Load() {
		panic(http.ErrAbortHandler)
	}
	select {
	case p.asked <- r.URL.String():
	default:
	}
	send := func(v any) {
		_ = json.NewEncoder(w).Encode(v)
		_ = http.NewResponseController(w).Flush()
	}
	at := time.Unix(1.8e9, 0).Add(time.Duration(len(p.name)) * time.Second)
	c := api.Connection{ID: 1, Time: at, Client: "10.0.0.1:1", DurationUS: 1}
	switch {
	case r.Header.Get(api.ReadOnly) == "":
		w.WriteHeader(http.StatusForbidden)
	case r.URL.Query().Get("filter") == "nix=1":
		w.WriteHeader(http.StatusBadRequest)
		send(&api.Error{Error: "no such field", Filter: "nix=1", End: 3})
	case r.URL.Path == api.PathStatus:
		send(&api.Status{Version: api.Version{Node: p.name}, Ready: true, Connections: 5})
	case r.URL.Path == api.PathServices:
		own := api.Service{Service: "shop/" + p.name, Protocol: "TCP"}
		both := api.Service{Service: "shop/both", Protocol: "TCP", Totals: api.Totals{Opened: 3}, Endpoints: []api.Endpoint{{Endpoint: "10.1.1.1:80", Standing: api.Standing{Open: 2}}}}
		send(&api.Services{Matched: 2, Services: []api.Service{both, own}})
	case r.URL.Path == api.PathConnections:
		later := c
		later.ID, later.Time = 2, at.Add(time.Hour)
		send(&api.Connections{Open: 2, Matched: 2, Connections: []api.Connection{c, later}})
	case r.URL.Path == api.PathFailures:
		send(&api.Failures{Failures: []api.Failure{{Time: at, Endpoint: p.name}}})
	case r.URL.Path == api.PathPast:
		send(map[string]any{"past": api.Past{Since: at, Kept: 1, Lost: 2}})
		c.End = "client_fin"
		send(&c)
	case r.URL.Path == api.PathTap:
		c.End = "client_fin"
		send(&c)
		<-r.Context().Done()
	case r.URL.Path == api.PathRates && p.older.Load() && r.URL.Query().Has("quiet"):
		w.WriteHeader(http.StatusBadRequest)
		send(&api.Error{Error: `parameter "quiet": not one of by, filter, interval, sort, limit`})
	case r.URL.Path == api.PathRates:
		row := api.Rates{Service: "shop/both", Protocol: "TCP", Opened: p.opened, FirstP99US: int64(p.opened)}
		for r.Context().Err() == nil && !p.down.Load() {
			send(&api.Frame{Seconds: 1, By: []string{"service"}, Total: row, Rows: []api.Rates{row}, Groups: 1})
			select {
			case <-time.After(100 * time.Millisecond):
			case <-r.Context().Done():
			}
		}
	default:
		send(&api.Version{Node: p.name})
	}
}

// fleet is the API of some played proxies.
type fleet struct {
	*testing.T
	api     *API
	proxies []*proxy
	nodes   []Node
	server  *httptest.Server
}

type through struct{ to string }

func (t through) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Host = t.to
	return http.DefaultTransport.RoundTrip(r)
}

func newFleet(t *testing.T, names ...string) *fleet {
	f := &fleet{T: t, api: New(5 * time.Second)}
	for i, name := range names {
		p := &proxy{name: name, opened: float64(10 * (i + 1)), asked: make(chan string, 100)}
		s := httptest.NewServer(p)
		t.Cleanup(s.Close)
		t.Cleanup(s.CloseClientConnections)
		f.proxies = append(f.proxies, p)
		f.nodes = append(f.nodes, Node{Name: name, ID: name, Transport: through{s.Listener.Addr().String()}})
	}
	f.server = httptest.NewServer(f.api)
	t.Cleanup(f.server.Close)
	t.Cleanup(f.server.CloseClientConnections)
	return f
}

// get asks the API. The answer is body, if it has status 200.
func (f *fleet) get(path string, body any) (string, int) {
	f.Helper()
	r := must.Get(http.Get(f.server.URL + path))(f)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err == nil && body != nil && r.StatusCode == http.StatusOK {
		err = json.Unmarshal(text, body)
	}
	if err != nil {
		f.Fatalf("%s: %v: %s", path, err, text)
	}
	return string(text), r.StatusCode
}

// lines calls line with each line of a stream until it returns true.
func (f *fleet) lines(path string, line func(text string) bool) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, f.server.URL+path, http.NoBody))(f)
	resp := must.Get(http.DefaultClient.Do(r))(f)
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); ; {
		if !lines.Scan() {
			f.Fatalf("%s: the stream has ended: %v", path, lines.Err())
		}
		if line(lines.Text()) {
			return
		}
	}
}

// Answers of all nodes are one, those that do not answer are named, and nobody waits for
// them.
func TestTogether(t *testing.T) {
	f := newFleet(t, "a", "bb", "gone")
	f.proxies[2].down.Store(true)
	f.api.Set(t.Context(), append(f.nodes, Node{Name: "starts", Trouble: errors.New("its pod is Pending")}))
	status := &api.Status{}
	f.get(api.PathStatus, status)
	var named []string
	for _, n := range status.Nodes {
		named = append(named, n.Node+" "+n.Trouble)
	}
	if got := strings.Join(named, ","); got != "a ,bb ,gone EOF,starts its pod is Pending" || status.Connections != 10 || !status.Ready || status.Node != "4 nodes" {
		t.Errorf("%s, %d connections of %s", got, status.Connections, status.Node)
	}
	services := &api.Services{}
	f.get(api.PathServices, services)
	var all []string
	for _, s := range services.Services {
		all = append(all, fmt.Sprint(s.Service, s.Totals.Opened))
	}
	if got := strings.Join(all, ","); got != "shop/a0,shop/bb0,shop/both6" || services.Services[2].Endpoints[0].Open != 4 {
		t.Errorf("%s, %+v", got, services.Services[2])
	}
	page := &api.Connections{}
	f.get(api.PathConnections+"?offset=1&limit=2", page)
	if c := page.Connections; page.Matched != 4 || len(c) != 2 || c[0].ProxyNode != "bb" || c[0].ID != 1 || c[1].ProxyNode != "a" || c[1].ID != 2 {
		t.Errorf("%+v", page)
	}
	failures := &api.Failures{}
	f.get(api.PathFailures+"?limit=2", failures)
	if l := failures.Failures; len(l) != 2 || l[0].ProxyNode != "bb" || l[1].ProxyNode != "a" {
		t.Errorf("%+v", l)
	}
	past, _ := f.get(api.PathPast, nil)
	if l := strings.Split(past, "\n"); len(l) != 4 || !strings.Contains(l[0], `"kept":2,"lost":4`) || !strings.Contains(l[1], `"proxy_node":"a"`) || !strings.Contains(l[2], `"proxy_node":"bb"`) {
		t.Error(past)
	}
	for _, path := range []string{api.PathConnections, api.PathTap} {
		if text, code := f.get(path+"?filter=nix%3D1", nil); code != http.StatusBadRequest || !strings.Contains(text, `"end":3`) {
			t.Errorf("%s: a wrong filter: %d, %s", path, code, text)
		}
	}
	if text, code := f.get(api.PathExplain, nil); code != http.StatusBadRequest || !strings.Contains(text, "choose a node") {
		t.Errorf("%d, %s", code, text)
	}
}

// A request that names a node is asked of its proxy alone.
func TestOneNode(t *testing.T) {
	f := newFleet(t, "a", "b", "gone")
	f.proxies[2].down.Store(true)
	f.api.Set(t.Context(), f.nodes)
	<-f.proxies[1].asked // its version
	status := &api.Status{}
	if f.get(api.PathStatus+"?proxy_node=b", status); status.Node != "b" || status.Connections != 5 || len(status.Nodes) != 3 {
		t.Fatalf("%+v", status)
	}
	<-f.proxies[1].asked
	f.get(api.PathExplain+"?proxy_node=b&from=10.0.0.1", nil)
	check.Equalf(t, <-f.proxies[1].asked, api.PathExplain+"?from=10.0.0.1", "the node was asked")
	for node, why := range map[string]string{"gone": "EOF", "nix": "there is no such node"} {
		if text, code := f.get(api.PathExplain+"?"+url.Values{Param: {node}}.Encode(), nil); code != http.StatusBadGateway || !strings.Contains(text, node+" does not answer: "+why) {
			t.Errorf("%d, %s", code, text)
		}
	}
}

// The rates of the nodes that answer add up, from when they answer.
func TestRates(t *testing.T) {
	f := newFleet(t, "a", "b", "c")
	f.proxies[1].older.Store(true)
	f.proxies[2].down.Store(true)
	f.api.Set(t.Context(), f.nodes)
	step := 0
	f.lines(api.PathRates+"?by=service&quiet=false", func(text string) bool {
		var frame api.Frame
		if err := json.Unmarshal([]byte(text), &frame); err != nil || len(frame.Rows) != 1 || frame.Rows[0].Opened != frame.Total.Opened {
			t.Fatalf("%v: %s", err, text)
		}
		switch {
		case step == 0 && frame.Total.Opened == 30: // of a and b
			check.Equalf(t, frame.Total.FirstP99US, 20, "the longest time")
			f.proxies[2].down.Store(false)
			f.api.Set(t.Context(), f.nodes)
			step++
		case step == 1 && frame.Total.Opened == 60:
			f.proxies[0].down.Store(true)
			step++
		case step == 2 && frame.Total.Opened == 50:
			return true
		}
		return false
	})
}

// Records of all nodes come in one stream, each with its node.
func TestTap(t *testing.T) {
	f := newFleet(t, "a", "b")
	f.api.Set(t.Context(), f.nodes)
	seen := make(map[string]bool)
	f.lines(api.PathTap+"?rate=3", func(text string) bool {
		var c api.Connection
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		seen[c.ProxyNode] = true
		return seen["a"] && seen["b"]
	})
	for asked := ""; !strings.HasPrefix(asked, api.PathTap); asked = <-f.proxies[0].asked {
		if strings.Contains(asked, "rate=3") {
			t.Errorf("each node was asked for all of them: %s", asked)
		}
	}
}
