package demo

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

func written(t *testing.T, console bool, r conntrack.Record) string {
	t.Helper()
	var text bytes.Buffer
	log := must.Get(conntrack.OpenLog(conntrack.LogOptions{Writer: &text, Console: console}))(t)
	log.Write([]conntrack.Record{r})
	must.OK(t, log.Close())
	return strings.TrimSuffix(text.String(), "\n")
}

func exampleRecord() conntrack.Record {
	endpoint := func(addr, pod string) *service.Endpoint {
		return &service.Endpoint{Addr: netip.MustParseAddrPort(addr), Pod: service.Name{Namespace: "shop", Name: pod}, Place: service.At("node-b", "zone-b")}
	}
	return conntrack.Record{
		ID: 7, Wall: time.Date(2026, 6, 1, 12, 0, 0, 250e6, time.UTC).UnixNano(), Protocol: service.TCP, Kind: service.ClusterIP,
		Client: netip.MustParseAddrPort("10.244.0.11:41822"), VIP: netip.MustParseAddrPort("10.96.0.30:80"),
		Port:     &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "search"}, Port: "http", Protocol: service.TCP}},
		Endpoint: endpoint("10.244.1.15:8080", "elm"), Attempts: 2, Connected: true, Affinity: balancer.AffinityMoved,
		Failed:      []conntrack.Attempt{{Endpoint: endpoint("10.244.1.14:8080", "dogwood"), Duration: 213_000, Error: conntrack.DialRefused}},
		ConnectTime: 400_000, FirstByte: 1_500_000, Duration: 12_000_000, BytesFromClient: 78, BytesFromEndpoint: 1234, End: conntrack.ClientFin,
	}
}

func TestParseRecord(t *testing.T) {
	r := must.Get(parseRecord([]byte(written(t, false, exampleRecord()))))(t)
	if r.Service != "shop/search:http" || r.Pod != "shop/elm" || r.Affinity != "moved" || r.Attempts != 2 || r.End != "client_fin" ||
		r.BytesFromClient != 78 || r.BytesFromEndpoint != 1234 || !r.retried() || r.Failed[0].Pod != "shop/dogwood" || r.Failed[0].Error != "refused" {
		t.Errorf("got %+v", r)
	}
	for _, line := range []string{"", "{", "{}", `{"client":"10.0.0.1:5"}`, `{"client":"nobody","vip":"10.0.0.1:5","end":"idle"}`, "2026 text"} {
		if _, err := parseRecord([]byte(line)); err == nil {
			t.Errorf("%q: no error", line)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"client":"10.0.0.1:5","vip":"10.96.0.1:80","service":"a/b:c","endpoint":"[::1]:8","pod":"a/b","affinity":"hit","attempts":2,` +
		`"failed_attempts":[{"endpoint":"10.1.0.4:8080","pod":"a/c","error":"refused","us":-5}],"connect_us":9,"duration_us":9e3,"end":"idle"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parseRecord(line)
		if err != nil {
			return
		}
		if r.console() == "" || !r.key.client.IsValid() || !r.key.vip.IsValid() {
			t.Errorf("%q: %+v", line, r)
		}
	})
}
