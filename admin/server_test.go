package admin

import (
	"cmp"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func get(t *testing.T, method, url string) (int, string) {
	t.Helper()
	request := must.Get(http.NewRequestWithContext(t.Context(), method, url, nil))(t)
	response := must.Get(http.DefaultClient.Do(request))(t)
	defer response.Body.Close()
	body := must.Get(io.ReadAll(response.Body))(t)
	return response.StatusCode, string(body)
}

// serve answers on a listening socket, and returns a function that ends it.
func serve(t *testing.T, l net.Listener, pages Pages) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		NewServer(pages, new(httpport.Group)).Keep(ctx, l, nil, time.Hour, func(err error) {
			check.OK(t, err)
		})
	}()
	return func() {
		cancel()
		<-done
	}
}

func TestServer(t *testing.T) {
	l := must.Get(Listen("127.0.0.1:0", net.Listen))(t)
	address := l.Addr().String()
	url := "http://" + address
	end := serve(t, l, Pages{Metrics: NewRegistry(sources(t)), Mode: func() string { return "iptables" }, Config: func() any { return map[string]string{"mode": ""} }, Profiling: true})

	if code, body := get(t, http.MethodGet, url+"/metrics"); code != http.StatusOK ||
		!strings.Contains(body, `sluice_connections_active{namespace="default",port="http",protocol="TCP",service="web"} 1`) ||
		!strings.Contains(body, "go_goroutines") || !strings.Contains(body, "process_open_fds") {
		t.Errorf("/metrics: %d\n%s", code, body)
	}
	if code, body := get(t, http.MethodGet, url+"/healthz"); code != http.StatusOK || body != "ok" {
		t.Errorf("/healthz: %d %q", code, body)
	}
	if code, body := get(t, http.MethodGet, url+"/proxyMode"); code != http.StatusOK || body != "iptables" {
		t.Errorf("/proxyMode: %d %q", code, body)
	}
	if code, body := get(t, http.MethodGet, url+"/configz"); code != http.StatusOK || body != `{"kubeproxy.config.k8s.io":{"mode":""}}` {
		t.Errorf("/configz: %d %q", code, body)
	}
	if code, body := get(t, http.MethodGet, url+"/debug/pprof/"); code != http.StatusOK || !strings.Contains(body, "goroutine") {
		t.Errorf("/debug/pprof/: %d %q", code, body)
	}
	if code, _ := get(t, http.MethodGet, url+"/"); code != http.StatusNotFound {
		t.Errorf("/: %d", code)
	}
	if code, _ := get(t, http.MethodPost, url+"/metrics"); code != http.StatusMethodNotAllowed {
		t.Errorf("POST /metrics: %d", code)
	}

	// A second one on that address says so, with the address.
	check.Errorf(t, must.Err(Listen(address, net.Listen)), "metrics address "+address, "second Listen")
	if _, err := Listen("nonsense", net.Listen); err == nil {
		t.Error("Listen on nonsense")
	}

	end()
	again, err := Listen(address, net.Listen)
	must.OKf(t, err, "the address is not free afterwards")

	// Nothing is shown that was not asked for.
	end = serve(t, again, Pages{Metrics: NewRegistry(sources(t))})
	defer end()
	for _, path := range []string{"/configz", "/debug/pprof/"} {
		if code, _ := get(t, http.MethodGet, url+path); code != http.StatusNotFound {
			t.Errorf("%s without asking for it: %d", path, code)
		}
	}
}

// The pages that components of Kubernetes have are there under their names, as
// text and as objects of the API.
func TestPagesOfComponents(t *testing.T) {
	began := time.Now().Add(-time.Hour)
	pages := (&Pages{Metrics: NewRegistry(sources(t)), Mode: func() string { return "ipvs" }, Flags: func() map[string]string { return map[string]string{"v": "4", "config": "/c"} }, Version: "v1.2.3"}).
		handler(began)
	const uptime = "the uptime" // stands for it: it depends on how long the test takes
	numbers := regexp.MustCompile(`Up: ([0-9hms]+)\n|"uptimeSeconds":([0-9]+),`)
	for _, c := range []struct {
		path, accept string
		want         []string
	}{
		{"/flagz", "", []string{"\nkube-proxy flagz\nWarning: ", "\nconfig=/c\nv=4\n"}},
		{"/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz", []string{`{"kind":"Flagz","apiVersion":"config.k8s.io/v1beta1","metadata":{"name":"kube-proxy"},"flags":{"config":"/c","v":"4"}}`}},
		{"/statusz", "", []string{"\nkube-proxy statusz\nWarning: ", "\nUp: " + uptime + "\n", "\nBinary version: v1.2.3\n", "\nPaths: /flagz /healthz /metrics /metrics/slis /proxyMode /statusz\n"}},
		{"/statusz", "text/plain, application/json; v=v1beta1; g=config.k8s.io; as=Statusz", []string{`"uptimeSeconds":` + uptime + `,`, `"binaryVersion":"v1.2.3","paths":["/flagz",`}},
		{"/statusz", "application/json", []string{"kube-proxy statusz"}},
		{"/metrics/slis", "", []string{"process_start_time_seconds "}},
		{"/healthz", "", []string{"ok"}},
		{"/healthz", "", []string{"ok"}},
		{"/metrics/slis", "", []string{
			"\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n",
			"\nkubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2\n",
		}},
	} {
		request := httptest.NewRequest(http.MethodGet, c.path, nil)
		if c.accept != "" {
			request.Header.Set("Accept", c.accept)
		}
		answer := httptest.NewRecorder()
		pages.ServeHTTP(answer, request)
		body := answer.Body.String()
		if m := numbers.FindStringSubmatch(body); m != nil {
			up, err := time.ParseDuration(cmp.Or(m[1], m[2]+"s"))
			if most := time.Since(began); err != nil || up < time.Hour || up > most {
				t.Errorf("%s: the uptime is %s, %v; want 1h to %s", c.path, up, err, most)
			}
			body = strings.Replace(body, cmp.Or(m[1], m[2]), uptime, 1)
		}
		for _, want := range c.want {
			if answer.Code != http.StatusOK || !strings.Contains(body, want) {
				t.Errorf("%s, Accept %q: %d\n%s\nwant %q in it", c.path, c.accept, answer.Code, body, want)
			}
		}
	}
}
