package show

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// lineOf reads a record in its JSON form.
func lineOf(t *testing.T, text string) string {
	t.Helper()
	var c api.Connection
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	must.OKf(t, d.Decode(&c), "%s", text)
	return Line(&c)
}

// The documentation shows the same records in both forms.
func TestLineOfDocumentedExamples(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = local })
	text := must.Read(t, "../../../../docs/connection-log.md")
	examples := regexp.MustCompile(`(?m)^\{"time".*$`).FindAllString(string(text), -1)
	if len(examples) < 6 {
		t.Errorf("%d examples in the documentation, want 6 at least", len(examples))
	}
	for _, example := range examples {
		check.Contains(t, string(text), "\n"+lineOf(t, example)+"\n")
	}
}

// Records that the documentation does not show have the console form of the access log
// too.
func TestLineIsTheConsoleForm(t *testing.T) {
	endpoint := &service.Endpoint{Addr: netip.MustParseAddrPort("10.244.1.15:8080"), Pod: service.Name{Namespace: "shop", Name: "elm|\x1b"}, Place: service.At("node b", "")}
	whole := conntrack.Record{
		Wall: time.Now().UnixNano(), Protocol: service.TCP, Client: netip.MustParseAddrPort("10.244.0.11:41822"), VIP: netip.MustParseAddrPort("10.96.0.30:80"),
		Endpoint: endpoint, Attempts: 2, Connected: true, Failed: []conntrack.Attempt{{Error: conntrack.DialNoAddress, Duration: 213_000}, {Endpoint: endpoint, Error: conntrack.DialRefused}},
		ConnectTime: 400_000, Duration: 12_000_000, BytesFromClient: 78, BytesFromEndpoint: 1234, End: conntrack.ClientFin,
	}
	opened := whole
	opened.Event = conntrack.Opened
	connecting := whole
	connecting.Connected, connecting.Attempts = false, 3
	failed := connecting
	failed.Attempts = 2
	lossy, alone := whole, failed
	lossy.SetTransport(&conntrack.Transport{
		Client:   conntrack.Side{Known: conntrack.BySocket, RTT: 1_200_000, Retransmits: 3},
		Endpoint: conntrack.Side{Known: conntrack.ByPackets, Retransmits: 4, Lost: 5},
	})
	alone.SetTransport(&conntrack.Transport{Client: conntrack.Side{Known: conntrack.BySocket, RTT: 80_000}})
	datagrams := conntrack.Record{Wall: whole.Wall, Protocol: service.UDP, Client: whole.Client, VIP: whole.VIP}
	refused := conntrack.Record{Event: conntrack.Refused, Wall: whole.Wall, Protocol: service.TCP, Client: netip.MustParseAddrPort("10.1.0.2:0"), VIP: whole.VIP, DatagramsFromClient: 1, End: conntrack.NoEndpoints}
	refused6 := refused
	refused6.Client, refused6.DatagramsFromClient = netip.MustParseAddrPort("[fd00::2]:0"), 2
	for _, r := range []conntrack.Record{whole, opened, connecting, failed, lossy, alone, datagrams, refused, refused6} {
		var forms [2]string
		for i, console := range []bool{false, true} {
			var text bytes.Buffer
			log := must.Get(conntrack.OpenLog(conntrack.LogOptions{Writer: &text, Console: console}))(t)
			log.Write([]conntrack.Record{r})
			must.OK(t, log.Close())
			forms[i] = text.String()
		}
		check.Textf(t, lineOf(t, forms[0])+"\n", forms[1], "the line")
		if r.Event == conntrack.Refused && !regexp.MustCompile(` (10.1.0.2|fd00::2) -> 10.96.0.30:80 \| (1 packet|2 packets) refused \| no_endpoints\n$`).MatchString(forms[1]) {
			t.Errorf("a refusal is told as %s", forms[1])
		}
	}
}
