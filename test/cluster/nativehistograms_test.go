//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
)

// nativePrometheus is the address of a Prometheus that scrapes native histograms.
const nativePrometheus = "127.0.0.1:9091"

// testNativeHistograms has Debian's Prometheus scrape native histograms: the quantiles of a
// Service's times are those of its records, to within a bucket, and the whole count is there.
func testNativeHistograms(t *testing.T, w *world) {
	const connections, step = 21, 20 * time.Millisecond // the last one is answered after 420 ms
	w.write("native.yml", `
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs: [{job_name: sluice, static_configs: [{targets: ["127.0.0.1:10249"]}]}]
`)
	w.start("prometheus-native", "prometheus", "--config.file", filepath.Join(w.dir, "native.yml"), "--storage.tsdb.path", filepath.Join(w.dir, "native"),
		"--web.listen-address", nativePrometheus, "--enable-feature=native-histograms")

	const port = 8077
	var served atomic.Int64
	w.hosts.Pods[0].ServeTCP(t, fmt.Sprint(":", port), func(c *net.TCPConn) {
		<-time.After(time.Duration(served.Add(1)-1) * step)
		_, _ = io.WriteString(c, "late\n")
	})
	svc := w.service("late", nil)
	w.slice("late", endpoint{host: w.hosts.Pods[0], node: "node", port: port})
	histograms := []struct{ name, field string }{
		{"connect", "connect_us"}, {"first_byte", "first_byte_us"}, {"connection", "duration_us"},
	}
	selector := func(name string) string { return "sluice_" + name + `_duration_seconds{service="late"}` }
	count := func(want int) {
		for _, h := range histograms {
			query := "histogram_count(" + selector(h.name) + ")"
			w.until(fmt.Sprint(query, " is ", want), func() error {
				_, got, err := w.queryOf(nativePrometheus, query)
				if err == nil && got != strconv.Itoa(want) {
					err = fmt.Errorf("it is %q", got)
				}
				return err
			})
		}
	}
	ask := func() error {
		return must.Err(askWithin(answer, w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80)))
	}
	w.until("the Service answers", ask)
	count(1) // a rate is of what comes after
	answers := make(chan error)
	for range connections {
		go func() { answers <- ask() }()
	}
	for range connections {
		must.OK(t, <-answers)
	}
	count(1 + connections)

	times := map[string][]float64{}
	for line := range strings.Lines(string(must.Read(t, filepath.Join(w.dir, "access.log")))) {
		var r map[string]any
		must.OK(t, json.Unmarshal([]byte(line), &r))
		for _, h := range histograms {
			if us, ok := r[h.field].(float64); ok && r["service"] == "n/late:p" {
				times[h.field] = append(times[h.field], us)
			}
		}
	}
	for _, h := range histograms {
		if len(times[h.field]) != 1+connections {
			t.Fatalf("%d records have %s", len(times[h.field]), h.field)
		}
		all := times[h.field][1:]
		slices.Sort(all)
		for _, q := range []float64{0.5, 0.99} {
			query := fmt.Sprintf("histogram_quantile(%v, sum by (namespace, service) (rate(%s[5m])))", q, selector(h.name))
			_, text, err := w.queryOf(nativePrometheus, query)
			must.OK(t, err)
			got, err := strconv.ParseFloat(text, 64)
			must.OKf(t, err, "%s", query)
			want := all[int(q*connections)]
			if got *= 1e6; got > 1.1*want+1 || got < want/1.1-1 {
				t.Errorf("%s is %.0f us; the records say %.0f us: %.0f", query, got, want, all)
			}
		}
	}
}
