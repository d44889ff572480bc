package serve

import (
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// act sends an action.
func (s *site) act(t *testing.T, path, body string, status int, answer any) {
	t.Helper()
	s.send(t, path, "application/json", body, status, answer)
}

func (s *site) send(t *testing.T, path, kind, body string, status int, answer any) {
	t.Helper()
	resp, err := s.client.Post(s.url+path, kind, strings.NewReader(body))
	must.OK(t, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	must.OK(t, err)
	if resp.StatusCode != status {
		t.Fatalf("%s %s: status %d: %s", path, body, resp.StatusCode, got)
	}
	strict(t, got, answer)
}

// Who says that he only reads may not act, and is told so.
func TestReadOnly(t *testing.T) {
	s := newSite(t)
	s.mayAct.Store(true)
	for header, want := range map[string]bool{"": true, "true": false} {
		for _, tt := range []struct{ method, path string }{{http.MethodGet, api.PathVersion}, {http.MethodPost, api.PathClose}} {
			r, err := http.NewRequestWithContext(t.Context(), tt.method, s.url+tt.path, strings.NewReader(`{"filter":"id>0","dry_run":true}`))
			must.OK(t, err)
			r.Header.Set("Content-Type", "application/json")
			if header != "" {
				r.Header.Set(api.ReadOnly, header)
			}
			resp, err := s.client.Do(r)
			must.OK(t, err)
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			must.OK(t, err)
			got := resp.StatusCode == http.StatusOK
			if tt.method == http.MethodGet {
				got = strings.Contains(string(body), `"actions":true`)
			}
			if got != want {
				t.Errorf("%s %s with %q: %s %s", tt.method, tt.path, header, resp.Status, body)
			}
		}
	}
}

// closing is an Owner that closes its record.
type closing struct {
	shard  *conntrack.Shard
	record *conntrack.Record
}

func (c closing) EndConnection(e conntrack.End) {
	c.record.End = e
	c.shard.Close(c.record)
}

func TestClose(t *testing.T) {
	s := newSite(t)
	var all []*conntrack.Record
	for _, client := range []string{"10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"} {
		r := s.open(client)
		s.on(func() { r.Owner = closing{s.shard, r} })
		all = append(all, r)
	}
	var failed api.Error
	s.act(t, api.PathClose, `{"filter":"client=10.0.0.1"}`, http.StatusForbidden, &failed)
	s.mayAct.Store(true)
	s.send(t, api.PathClose, "text/plain", `{"filter":"client=10.0.0.1"}`, http.StatusUnsupportedMediaType, &failed)
	for _, body := range []string{
		``, `{}`, `{"filter":""}`, `{"filter":"nix=1"}`, `{"filtre":"id>0"}`, `{"filter":"id>0"}{}`, `{"filter":"id>0","limit":-1}`,
		`{"filter":"` + strings.Repeat("a ", 4000) + `"}`,
	} {
		failed = api.Error{}
		if s.act(t, api.PathClose, body, http.StatusBadRequest, &failed); failed.Error == "" {
			t.Errorf("%s: no error", body)
		}
	}
	var closed api.Closed
	s.act(t, api.PathClose, `{"filter":"client=10.0.0.1","dry_run":true}`, http.StatusOK, &closed)
	check.Equal(t, closed, api.Closed{Matched: 2})
	closed = api.Closed{}
	s.act(t, api.PathClose, `{"filter":"idle>0s","dry_run":true}`, http.StatusOK, &closed)
	check.Equalf(t, closed, api.Closed{}, "no transport says for how long its connection was idle")
	if s.log.Len() > 0 {
		t.Errorf("the log says %s, and nothing was done", s.log.String())
	}
	s.act(t, api.PathClose, `{"filter":"client=10.0.0.1 service=shop/web"}`, http.StatusOK, &closed)
	check.Equal(t, closed, api.Closed{Matched: 2, Ended: 2})
	s.on(func() {
		for i, want := range []conntrack.End{conntrack.Admin, conntrack.Admin, conntrack.EndNone} {
			check.Equalf(t, all[i].End, want, "connection %d ended with", i)
		}
	})
	if !strings.Contains(s.log.String(), `"filter":"client=10.0.0.1 service=shop/web","ended":2`) {
		t.Errorf("the log says %s", s.log.String())
	}
}

// drained reports whether an endpoint is drained.
func (s *site) drained(addr, pod string) bool {
	e := &service.Endpoint{Addr: netip.MustParseAddrPort(addr)}
	if pod != "" {
		e.Pod = service.Name{Namespace: "shop", Name: pod}
	}
	return s.set.Has(e)
}

func TestDrain(t *testing.T) {
	s := newSite(t)
	s.mayAct.Store(true)
	s.open("10.0.0.1:1") // to 10.1.0.5
	var drains api.Drains
	s.act(t, api.PathDrain, `{"endpoint":"10.1.0.5:80"}`, http.StatusOK, &drains)
	if len(drains.Drained) != 1 || drains.Changed != 1 || drains.Drained[0].Open != 1 || drains.Drained[0].Services[0] != "shop/web:http" || drains.Drained[0].LastResort != nil {
		t.Errorf("%+v", drains)
	}
	if !s.drained("10.1.0.5:80", "") || s.drained("10.1.0.4:80", "web-a") {
		t.Errorf("%v is in force", s.set)
	}
	drains = api.Drains{}
	s.act(t, api.PathDrain, `{"endpoint":"shop/web-a"}`, http.StatusOK, &drains)
	if len(drains.Drained) != 2 || drains.Drained[0].Endpoint != "10.1.0.4" || drains.Drained[0].Pod != "shop/web-a" || len(drains.Drained[0].LastResort) != 1 {
		t.Errorf("%+v", drains)
	}
	if !s.drained("10.1.0.4:80", "web-a") {
		t.Errorf("%v is in force", s.set)
	}
	drains = api.Drains{}
	s.act(t, api.PathDrain, `{"endpoint":"shop/web-a"}`, http.StatusOK, &drains)
	if len(drains.Drained) != 2 || drains.Changed != 0 {
		t.Errorf("drained again: %+v", drains)
	}
	var failed api.Error
	s.act(t, api.PathDrain, `{"endpoint":"10.9.9.9"}`, http.StatusNotFound, &failed)
	s.act(t, api.PathDrain, `{"endpoint":"web"}`, http.StatusBadRequest, &failed)
	drains = api.Drains{}
	s.act(t, api.PathDrain, `{"endpoint":"shop/web-a","back":true}`, http.StatusOK, &drains)
	if len(drains.Drained) != 1 || drains.Changed != 1 || s.drained("10.1.0.4:80", "web-a") {
		t.Errorf("%+v", drains)
	}
	drains = api.Drains{}
	s.ask(t, api.PathDrain, http.StatusOK, &drains)
	check.Equalf(t, len(drains.Drained), 1, "%+v", drains)
	if strings.Count(s.log.String(), "drained") != 2 || strings.Count(s.log.String(), "taken back") != 1 {
		t.Errorf("the log says %s", s.log.String())
	}
}

// A drain of a pod is of no other pod that has its address: one of the host's network, or
// the next one.
func TestDrainOfASharedAddress(t *testing.T) {
	at := func(name string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: []string{"10.1.0.9"}, TargetRef: pod(name)}
	}
	s := newSite(t, slice("a", 81, at("host-a")), slice("b", 82, at("host-b")))
	s.mayAct.Store(true)
	for i, name := range []string{"host-a", "host-b"} {
		var drains api.Drains
		s.act(t, api.PathDrain, `{"endpoint":"shop/`+name+`"}`, http.StatusOK, &drains)
		if len(drains.Drained) != i+1 || drains.Drained[i].Pod != "shop/"+name || len(drains.Drained[i].Services) != 1 {
			t.Errorf("%s is drained: %+v", name, drains)
		}
		if isLast := i == 1; isLast != (len(drains.Drained[i].LastResort) == 1) {
			t.Errorf("%s: %+v", name, drains.Drained[i])
		}
	}
	if s.drained("10.1.0.9:81", "host-c") || !s.drained("10.1.0.9:81", "host-a") {
		t.Errorf("%v is in force", s.set)
	}
	var drains api.Drains
	if s.act(t, api.PathDrain, `{"endpoint":"shop/host-a","back":true}`, http.StatusOK, &drains); drains.Changed != 1 || len(drains.Drained) != 1 {
		t.Errorf("host-a is taken back: %+v", drains)
	}
	drains = api.Drains{}
	if s.act(t, api.PathDrain, `{"endpoint":"10.1.0.9","back":true}`, http.StatusOK, &drains); drains.Changed != 1 || len(drains.Drained) != 0 {
		t.Errorf("the address is taken back: %+v", drains)
	}
}

// With the traffic policy Local, an endpoint that is drained serves on if no other one of
// this node is ready, although one elsewhere is.
func TestLastResort(t *testing.T) {
	at := func(addr string, local, ready bool) service.Endpoint {
		return service.Endpoint{Addr: netip.MustParseAddrPort(addr), Local: local, Ready: ready, Serving: true}
	}
	here, elsewhere := at("10.1.0.4:80", true, true), at("10.1.1.4:80", false, true)
	for _, tt := range []struct {
		name               string
		internal, external bool
		drained            service.Endpoint
		others             []service.Endpoint
		want               bool
	}{
		{"no other", false, false, here, nil, true},
		{"one elsewhere", false, false, here, []service.Endpoint{elsewhere}, false},
		{"one elsewhere, internal Local", true, false, here, []service.Endpoint{elsewhere}, true},
		{"one elsewhere, external Local", false, true, here, []service.Endpoint{elsewhere}, true},
		{"one here, Local", true, true, here, []service.Endpoint{elsewhere, at("10.1.0.5:80", true, true)}, false},
		{"one here that is not ready, Local", true, true, here, []service.Endpoint{elsewhere, at("10.1.0.5:80", true, false)}, true},
		{"drained elsewhere, Local", true, true, elsewhere, []service.Endpoint{at("10.1.1.5:80", false, true)}, false},
	} {
		p := &service.Port{InternalLocal: tt.internal, ExternalLocal: tt.external}
		p.Families[service.IPv4].Endpoints = append([]service.Endpoint{tt.drained}, tt.others...)
		set := policy.Drained{policy.Drain{Addr: tt.drained.Addr}: {}}
		check.Equalf(t, isLastResort(p, &tt.drained, set), tt.want, "%s", tt.name)
	}
}

func TestState(t *testing.T) {
	s := newSite(t)
	var status api.Status
	s.ask(t, api.PathStatus, http.StatusOK, &status)
	if !status.Ready || status.Node != "node-a" {
		t.Errorf("%+v", status)
	}
	var config api.Config
	s.ask(t, api.PathConfig, http.StatusOK, &config)
	check.Equalf(t, config.Flags["v"], "0", "%+v", config)
	var answer map[string]string
	s.ask(t, api.PathExplain+"?protocol=tcp&from=10.0.0.1&to=10.96.0.10:80", http.StatusOK, &answer)
	check.Equalf(t, answer["verdict"], "tcp10.0.0.110.96.0.10:80false", "%v", answer)
	var failed api.Error
	s.ask(t, api.PathExplain, http.StatusBadRequest, &failed)
	var completions api.Completions
	for filter, want := range map[string]string{"service=": "shop/web:http", "end=cl": "client_abort", "endpoint=": "10.1.0.4:80", "pod=": "shop/web-a", "dur": "duration>"} {
		s.ask(t, api.PathComplete+"?filter="+url.QueryEscape(filter), http.StatusOK, &completions)
		if len(completions.Suggestions) == 0 || completions.Suggestions[0].Text != want {
			t.Errorf("%s goes on with %+v, want %s", filter, completions, want)
		}
	}
	s.mayAct.Store(true)
	s.act(t, api.PathVerbosity, `{"v":11,"seconds":5}`, http.StatusBadRequest, &failed)
	s.act(t, api.PathVerbosity, `{"v":4,"seconds":0}`, http.StatusBadRequest, &failed)
	var state api.LogState
	s.act(t, api.PathVerbosity, `{"v":4,"seconds":5}`, http.StatusOK, &state)
	if s.v != "4 5s" || state.V != 4 || state.Until == nil {
		t.Errorf("%s is set, the answer is %+v", s.v, state)
	}
}

// Refused packets are failures without a connection: they name the client without its port.
func TestRefusedPackets(t *testing.T) {
	s := newSite(t)
	s.table.Refuse([]conntrack.Refusal{{
		Client: netip.MustParseAddr("10.0.0.1"), VIP: netip.MustParseAddrPort("10.96.0.10:81"), Protocol: service.TCP, Reason: conntrack.UnknownPort, Packets: 4,
	}}, 0, true)
	var got api.Failures
	s.ask(t, api.PathFailures, http.StatusOK, &got)
	check.Equal(t, len(got.Failures), 1)
	want := api.Failure{Time: got.Failures[0].Time, Client: "10.0.0.1", VIP: "10.96.0.10:81", Error: "unknown_port", Packets: 4}
	check.Equal(t, got.Failures[0], want)
}
