package admin

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Diagnostic pages of Kubernetes components (KEP-4827 and KEP-4828), and the
// metrics of health checks (KEP-3466). Their text format is not stable; programs
// should request JSON.
const (
	component = "kube-proxy" // the component that Sluice replaces
	zpageHead = `
%s %s
Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.
`
)

// zpage is the JSON form of flagz and statusz.
type zpage struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`

	Flags map[string]string `json:"flags,omitempty"`

	StartTime     string   `json:"startTime,omitempty"` // RFC 3339
	UptimeSeconds *int64   `json:"uptimeSeconds,omitempty"`
	GoVersion     string   `json:"goVersion,omitempty"`
	BinaryVersion string   `json:"binaryVersion,omitempty"`
	Paths         []string `json:"paths,omitempty"`
}

// flagz serves the flags and their values.
func flagz(values func() map[string]string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		flags := values()
		if asJSON(r, "Flagz") {
			writeZpage(w, "Flagz", &zpage{Flags: flags})
			return
		}
		var b strings.Builder
		fmt.Fprintf(&b, zpageHead, component, "flagz")
		for _, name := range slices.Sorted(maps.Keys(flags)) {
			fmt.Fprintf(&b, "%s=%s\n", name, flags[name])
		}
		text(b.String())(w, r)
	}
}

// statusz serves the program's version, its uptime and the list of pages.
func statusz(version string, started time.Time, paths []string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		up := time.Since(started)
		if asJSON(r, "Statusz") {
			seconds := int64(up.Seconds())
			writeZpage(w, "Statusz", &zpage{
				StartTime: started.UTC().Format(time.RFC3339), UptimeSeconds: &seconds,
				GoVersion: runtime.Version(), BinaryVersion: version, Paths: paths,
			})
			return
		}
		text(fmt.Sprintf(zpageHead, component, "statusz")+fmt.Sprintf(`
Started: %s
Up: %s
Go version: %s
Binary version: %s

Paths: %s
`, started.Format(time.UnixDate), up.Truncate(time.Second), runtime.Version(), version, strings.Join(paths, " ")))(w, r)
	}
}

// asJSON reports whether a request asks for an API object, such as
// application/json;v=v1beta1;g=config.k8s.io;as=Flagz.
func asJSON(r *http.Request, kind string) bool {
	for _, accept := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(strings.ReplaceAll(accept, " ", ""), ",") {
			params := strings.Split(part, ";")
			if params[0] == "application/json" && slices.Contains(params, "as="+kind) && slices.Contains(params, "v=v1beta1") {
				return true
			}
		}
	}
	return false
}

func writeZpage(w http.ResponseWriter, kind string, page *zpage) {
	page.Kind, page.APIVersion, page.Metadata.Name = kind, "config.k8s.io/v1beta1", component
	writeJSON(w, page)
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(body) // ignore the error: the client has closed the connection
}

// slis counts the results of /healthz for /metrics/slis.
type slis struct {
	last  *prometheus.GaugeVec
	total *prometheus.CounterVec
	all   *prometheus.Registry
}

func newSLIs(started time.Time) *slis {
	s := &slis{
		last: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kubernetes_healthcheck", Help: "The result of the last health check of that name: 1 is success.",
		}, []string{"name", "type"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kubernetes_healthchecks_total", Help: "Health checks, by name and result.",
		}, []string{"name", "type", "status"}),
		all: prometheus.NewRegistry(),
	}
	start := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "process_start_time_seconds", Help: "Start time of the process since unix epoch in seconds.",
	})
	start.Set(seconds(started))
	s.all.MustRegister(s.last, s.total, start)
	return s
}

// observe counts a request for /healthz, then serves it.
func (s *slis) observe(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.last.WithLabelValues("ping", "healthz").Set(1)
		s.total.WithLabelValues("ping", "healthz", "success").Inc()
		next(w, r)
	}
}
