package conntrack

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// examples are the records that docs/connection-log.md shows.
func examples() []Record {
	list := plainExamples()
	const ms = int64(time.Millisecond)
	list[1].SetTransport(&Transport{
		Idle:     60100 * ms,
		Client:   Side{Known: BySocket, RTT: 31 * ms, Idle: 64200 * ms, Window: 65536, Retransmits: 212},
		Endpoint: Side{Known: BySocket, RTT: 420_000, Idle: 60100 * ms, Unacked: 1448, Window: 64256, Retransmits: 9, Unanswered: 8},
	})
	return list
}

// plainExamples are the examples without what TCP says.
func plainExamples() []Record {
	wall := time.Date(2026, 6, 1, 12, 0, 0, 250123456, time.UTC).UnixNano()
	ms := int64(time.Millisecond)
	dead := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:8080"), Place: service.At("node-a", "z1"), Pod: service.Name{Namespace: "default", Name: "web-1"}}
	live := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:8080"), Place: service.At("node-b", "z2"), Pod: service.Name{Namespace: "default", Name: "web-2"}}
	named := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.9:53"), Place: service.At("node-a", ""), Pod: service.Name{Namespace: "kube-system", Name: "dns-1"}}
	bare := &service.Endpoint{Addr: netip.MustParseAddrPort("[fd00:1::7]:5432")}
	db := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "db"}, Protocol: service.TCP}}
	dns := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "kube-system", Name: "dns"}, Protocol: service.UDP}}
	diameter := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "core", Name: "hss"}, Port: "diameter", Protocol: service.SCTP}}
	return []Record{
		{
			self: &self{name: "node-a"},
			ID:   1, Wall: wall, Protocol: service.TCP,
			Client: netip.MustParseAddrPort("10.0.0.7:41822"), VIP: netip.MustParseAddrPort("10.96.0.10:80"), Kind: service.ClusterIP,
			Port: portHTTP, Endpoint: live, SourceAddr: netip.MustParseAddrPort("10.1.0.1:40112"), Attempts: 1, Connected: true,
			ConnectTime: ms / 5, FirstByte: ms * 3 / 2, Duration: 12 * ms, BytesFromClient: 78, BytesFromEndpoint: 1290, End: ClientFin,
		},
		{
			ID: 2, Wall: wall + 17*ms, Protocol: service.TCP,
			Client: netip.MustParseAddrPort("10.0.0.7:41830"), VIP: netip.MustParseAddrPort("192.0.2.1:80"), Kind: service.LoadBalancer,
			Port: portHTTP, Endpoint: live, Source: policy.SourceClient, SourceAddr: netip.MustParseAddrPort("10.0.0.7:61930"), Affinity: balancer.AffinityMoved, Attempts: 2, Connected: true,
			Failed:      []Attempt{{dead, 250 * ms, DialTimeout}},
			ConnectTime: 251 * ms, FirstByte: 253 * ms, Duration: 3725 * 1000 * ms, BytesFromClient: 5 << 20, BytesFromEndpoint: 3 << 29, End: EndpointTimeout,
		},
		{
			ID: 3, Wall: wall + 40*ms, Protocol: service.TCP,
			Client: netip.MustParseAddrPort("[fd00::9]:50000"), VIP: netip.MustParseAddrPort("[fd00:96::5]:5432"), Kind: service.ClusterIP,
			Port: db, Endpoint: bare, Affinity: balancer.AffinityNew, Attempts: 4,
			Failed:   []Attempt{{bare, 250 * ms, DialTimeout}, {bare, 500 * ms, DialTimeout}, {bare, 1000 * ms, DialTimeout}, {bare, 2000 * ms, DialTimeout}},
			Duration: 3750310000, End: ConnectFailed,
		},
		{
			ID: 4, Wall: wall + 51*ms, Protocol: service.TCP,
			Client: netip.MustParseAddrPort("10.0.0.8:40000"), VIP: netip.MustParseAddrPort("10.96.0.10:80"), Kind: service.ClusterIP,
			Port: portHTTP, self: &self{waited: 15000}, Duration: 20000, End: NoEndpoints,
		},
		{
			ID: 5, Wall: wall + 60*ms, Protocol: service.UDP,
			Client: netip.MustParseAddrPort("10.0.0.8:40001"), VIP: netip.MustParseAddrPort("10.96.0.2:53"), Kind: service.ClusterIP,
			Port: dns, Endpoint: named, SourceAddr: netip.MustParseAddrPort("10.1.0.1:53911"), Attempts: 1, FirstByte: ms, Duration: 2 * ms, End: Responses,
			BytesFromClient: 31, BytesFromEndpoint: 47, DatagramsFromClient: 1, DatagramsFromEndpoint: 1,
		},
		{
			ID: 6, Wall: wall + 70*ms, Protocol: service.SCTP,
			Client: netip.MustParseAddrPort("10.0.0.9:36412"), VIP: netip.MustParseAddrPort("10.96.0.3:3868"), Kind: service.ClusterIP,
			Port: diameter, Endpoint: live, SourceAddr: netip.MustParseAddrPort("10.1.0.1:40113"), Attempts: 1, Connected: true,
			ConnectTime: ms, FirstByte: 2 * ms, Duration: 90 * 1000 * ms, End: ClientShutdown, StreamsFromClient: 10, StreamsToClient: 10,
			BytesFromClient: 5120, BytesFromEndpoint: 3072, DatagramsFromClient: 40, DatagramsFromEndpoint: 38,
		},
	}
}

func encodeAll(t *testing.T, console bool, records []Record) string {
	t.Helper()
	var out bytes.Buffer
	l, err := OpenLog(LogOptions{Writer: &out, Console: console, Zone: time.UTC})
	must.OK(t, err)
	l.Write(records)
	must.OK(t, l.Close())
	return out.String()
}

const docPath = "../docs/connection-log.md"

func doc(t *testing.T) string {
	t.Helper()
	text := must.Read(t, docPath)
	return string(text)
}

// The examples in the documentation are what the code writes.
func TestDocumentedExamples(t *testing.T) {
	text := doc(t)
	for _, console := range []bool{false, true} {
		for line := range strings.Lines(encodeAll(t, console, examples())) {
			if !strings.Contains(text, line) {
				t.Errorf("%s does not show\n%s", docPath, line)
			}
		}
	}
}

// documentedRow is a row of a table in the documentation.
var documentedRow = regexp.MustCompile("(?m)^\\| `([a-zX_.\\[\\]]+)` \\|")

// documentedIn returns the first column of the table below a heading of docs/connection-log.md.
func documentedIn(t *testing.T, heading string) []string {
	t.Helper()
	return documentedBy(t, docPath, heading)
}

// documentedOfTCP returns the fields of --record-tcp.
func documentedOfTCP(t *testing.T) (fields []string) {
	t.Helper()
	for _, side := range []string{"client", "endpoint"} {
		for _, f := range documentedBy(t, "../docs/admin-api.md", "### What the transport says") {
			if of, isOfSide := strings.CutPrefix(f, "X_"); isOfSide {
				f = side + "_" + of
			}
			fields = append(fields, f)
		}
	}
	slices.Sort(fields)
	return slices.Compact(fields)
}

func documentedBy(t *testing.T, path, heading string) []string {
	t.Helper()
	_, text, ok := strings.Cut(string(must.Read(t, path)), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("%s has no heading %q", path, heading)
	}
	text, _, _ = strings.Cut(text, "\n##")
	var rows []string
	for _, m := range documentedRow.FindAllStringSubmatch(text, -1) {
		rows = append(rows, m[1])
	}
	return rows
}

// fieldsOf returns the fields that a record is written with, in order.
func fieldsOf(t *testing.T, r *Record) (written []string) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(encodeAll(t, false, []Record{*r})))
	path := ""
	for depth, key := 0, true; d.More() || depth > 0; {
		token, err := d.Token()
		must.OK(t, err)
		switch token {
		case json.Delim('{'):
			depth++
			key = true
			continue
		case json.Delim('['):
			path = written[len(written)-1] + "[]."
			continue
		case json.Delim('}'):
			depth--
			key = true
			continue
		case json.Delim(']'):
			path, key = "", true
			continue
		}
		if key {
			written = append(written, path+token.(string))
		}
		key = !key
	}
	return written
}

// The documentation lists the fields that the code writes, in its order, and no
// others.
func TestDocumentedFields(t *testing.T) {
	documented, ofTCP := documentedIn(t, "## Fields of the JSON form"), documentedOfTCP(t)
	// The second example has all of them, but for the node as client, a load balancer, a wait and
	// those of another protocol. One that is open has an event, and no end.
	example := plainExamples()[1]
	example.self, example.Protocol = &self{name: "node-a", via: example.VIP, waited: 1000}, service.UDP
	ended := fieldsOf(t, &example)
	example.Event = Opened
	opened := fieldsOf(t, &example)
	written := append(opened, "end")
	example = plainExamples()[1]
	example.self, example.Protocol = &self{name: "node-a", via: example.VIP, waited: 1000}, service.SCTP
	for _, f := range fieldsOf(t, &example) {
		if !slices.Contains(written, f) {
			written = slices.Insert(written, len(written)-1, f)
			ended = slices.Insert(ended, len(ended)-1, f)
		}
	}
	if want := slices.DeleteFunc(slices.Clone(written), func(f string) bool { return f == "event" }); !slices.Equal(ended, want) {
		t.Errorf("a record of the end has %v, want %v", ended, want)
	}
	refused := Record{Event: Refused, Port: example.Port, End: NoEndpoints}
	written = slices.Insert(written, len(written)-1, "packets")
	for _, f := range fieldsOf(t, &refused) {
		if !slices.Contains(written, f) {
			t.Errorf("a refusal has the field %s, which others do not have", f)
		}
	}
	if !slices.Equal(documented, written) {
		t.Errorf("%s lists\n%v, the code writes\n%v", docPath, documented, written)
	}
	both := make(map[string]bool)
	for _, known := range []Known{BySocket, ByPackets} {
		example = plainExamples()[1]
		without := fieldsOf(t, &example)
		example.SetTransport(&Transport{Client: Side{Known: known, RTT: 1}, Endpoint: Side{Known: known, RTT: 1}})
		for _, f := range fieldsOf(t, &example) {
			if !slices.Contains(without, f) {
				both[f] = true
			}
		}
	}
	if got := slices.Sorted(maps.Keys(both)); !slices.Equal(got, slices.Sorted(slices.Values(ofTCP))) {
		t.Errorf("documented of TCP are\n%v, the code writes\n%v", ofTCP, got)
	}
}

// The documentation explains every value of the fields that have a fixed set,
// and no others.
func TestDocumentedValues(t *testing.T) {
	var ends, dialErrors, affinities []string
	for a := balancer.Affinity(0); a.String() != "unknown"; a++ {
		affinities = append(affinities, a.String())
	}
	for _, e := range Ends() {
		ends = append(ends, e.String())
	}
	for _, e := range DialErrors() {
		dialErrors = append(dialErrors, e.String())
	}
	for heading, want := range map[string][]string{
		"### `end`":                     ends,
		"### `affinity`":                affinities,
		"### `failed_attempts[].error`": dialErrors,
	} {
		got := documentedIn(t, heading)
		slices.Sort(got)
		if !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("%s lists %v below %s, the code writes %v", docPath, got, heading, want)
		}
	}
	var inText []string
	inText = append(inText, policy.SourceNode.String(), policy.SourceClient.String())
	for _, k := range []service.AddressKind{service.ClusterIP, service.ExternalIP, service.LoadBalancer, service.NodePort} {
		inText = append(inText, k.String())
	}
	for _, v := range inText {
		if !strings.Contains(doc(t), "`"+v+"`") {
			t.Errorf("%s does not explain `%s`", docPath, v)
		}
	}
}

// Every line is one JSON object whose fields have the types that programs expect.
func TestJSONTypes(t *testing.T) {
	text := encodeAll(t, false, examples())
	if strings.Count(text, "\n") != len(examples()) {
		t.Fatalf("%d lines for %d records", strings.Count(text, "\n"), len(examples()))
	}
	for line := range strings.Lines(text) {
		var r struct {
			Time              time.Time `json:"time"`
			ID                uint64    `json:"id"`
			Attempts          int       `json:"attempts"`
			Client, VIP       netip.AddrPort
			Endpoint          *netip.AddrPort
			WaitedUS          *int64 `json:"waited_us"`
			ConnectUS         *int64 `json:"connect_us"`
			FirstByteUS       *int64 `json:"first_byte_us"`
			DurationUS        int64  `json:"duration_us"`
			BytesFromClient   uint64 `json:"bytes_from_client"`
			BytesFromEndpoint uint64 `json:"bytes_from_endpoint"`
			End               string
			FailedAttempts    []struct {
				Endpoint netip.AddrPort
				Pod      string
				Error    string
				US       int64
			} `json:"failed_attempts"`
		}
		check.OKf(t, json.Unmarshal([]byte(line), &r), "%s", line)
		want := examples()[r.ID-1]
		if r.Time.UnixNano() != want.Wall/1000*1000 || r.Client != want.Client || r.End != want.End.String() ||
			r.Attempts != int(want.Attempts) || len(r.FailedAttempts) != len(want.Failed) ||
			(r.ConnectUS != nil) != want.Connected || (r.WaitedUS != nil) != (want.WaitTime() > 0) || r.BytesFromEndpoint != want.BytesFromEndpoint ||
			r.DurationUS != want.Duration/1000 || (r.Endpoint != nil) != (want.Endpoint != nil) {
			t.Errorf("%s is not %+v", line, want)
		}
		for i, a := range r.FailedAttempts {
			if a.Endpoint != want.Failed[i].Endpoint.Addr || a.Error != want.Failed[i].Error.String() || a.US != want.Failed[i].Duration/1000 {
				t.Errorf("attempt %d of %s", i, line)
			}
		}
	}
}

// Unvalidated names can neither break a line nor send control characters to a
// terminal.
func TestHostileNames(t *testing.T) {
	evil := "a\n\x1b[2J\"b\x7f"
	r := examples()[1]
	ep := *r.Endpoint
	ep.Pod.Name, ep.Place = evil, service.At(evil, evil)
	r.Endpoint = &ep
	r.Failed = []Attempt{{&ep, 1, DialRefused}}
	r.Port = &service.Port{Name: service.PortName{Name: service.Name{Namespace: evil, Name: evil}, Port: evil}}
	for _, console := range []bool{false, true} {
		text := encodeAll(t, console, []Record{r})
		if strings.Count(text, "\n") != 1 || strings.ContainsAny(text[:len(text)-1], "\n\x1b\x7f") && console {
			t.Errorf("console %v: %q", console, text)
		}
		if !console {
			var v map[string]any
			if err := json.Unmarshal([]byte(text), &v); err != nil || v["node"] != evil || v["pod"] != "default/"+evil {
				t.Errorf("%v: %s", err, text)
			}
		}
	}
}

func TestEmptyRecord(t *testing.T) {
	for _, console := range []bool{false, true} {
		if text := encodeAll(t, console, make([]Record, 1)); strings.Count(text, "\n") != 1 {
			t.Errorf("console %v: %q", console, text)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	for form, console := range map[string]bool{"json": false, "console": true} {
		for i, name := range []string{"plain", "retried"} {
			b.Run(form+"/"+name, func(b *testing.B) {
				l, err := OpenLog(LogOptions{Writer: discard{}, Console: console})
				must.OK(b, err)
				batch := slices.Repeat(examples()[i:i+1], batchSize)
				b.ReportAllocs()
				for n := 0; n < b.N; n += batchSize {
					l.Write(batch)
				}
			})
		}
	}
}

// discard is io.Discard without its shortcuts.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// A connection's whole cost for its record, the log on its own goroutine.
func BenchmarkOpenClose(b *testing.B) {
	run := func(b *testing.B, sink Sink) {
		table := NewTable(Options{Sink: sink})
		s := table.Shard(0)
		c := table.Counters(portHTTP.Name)
		records := make([]Record, 1024)
		b.ReportAllocs()
		b.ResetTimer()
		for n := range b.N {
			r := &records[n%len(records)]
			*r = examples1
			r.Counters = c
			s.Open(r)
			r.BeginAttempt(r.Endpoint, 5)
			r.AttemptSucceeded(10)
			r.End, r.FirstByte, r.Duration = ClientFin, 20, 30
			s.Close(r)
		}
		b.StopTimer()
		s.Flush()
		check.OK(b, table.Close(b.Context()))
		b.ReportMetric(float64(table.Stats().Dropped)/float64(b.N), "dropped/op")
	}
	b.Run("no-log", func(b *testing.B) { run(b, nil) })
	b.Run("sink", func(b *testing.B) { run(b, &ignore{}) })
	b.Run("json", func(b *testing.B) {
		l, err := OpenLog(LogOptions{Writer: discard{}})
		must.OK(b, err)
		run(b, l)
	})
}

// ignore is a Sink that does nothing.
type ignore struct{}

func (*ignore) Write([]Record) {}
func (*ignore) Flush()         {}

var examples1 = Record{
	Client: netip.MustParseAddrPort("10.0.0.7:41822"), VIP: netip.MustParseAddrPort("10.96.0.10:80"),
	Port: portHTTP, Endpoint: endpoint, Protocol: service.TCP, Kind: service.ClusterIP,
}

// TestConsoleNamesForgeNothing has names with blanks and what separates fields:
// outside of quotes the line has as many fields as any, and one end.
func TestConsoleNamesForgeNothing(t *testing.T) {
	const forged = "x | 5 B up, 5 B down | client_fin\u009b2J\u202e"
	port := &service.Port{Name: service.PortName{Name: service.Name{Namespace: forged, Name: forged}, Port: forged}}
	endpoint := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:8080"), Place: service.At(forged, ""), Pod: service.Name{Name: forged}}
	var out bytes.Buffer
	newConsoleEncoder(&out, time.UTC).encode(&Record{
		Port: port, Endpoint: endpoint, Connected: true, Attempts: 2, Failed: []Attempt{{Endpoint: endpoint, Error: DialRefused}}, End: EndpointReset,
	})
	var bare strings.Builder
	quoted := false
	for _, r := range out.String() {
		switch {
		case r == '"':
			quoted = !quoted
		case !quoted:
			bare.WriteRune(r)
		}
	}
	if line := bare.String(); strings.Contains(line, "client_fin") || strings.Count(line, " | ") != 4 || !strings.HasSuffix(line, "| endpoint_reset\n") {
		t.Errorf("%q is %q without what is quoted", out.String(), line)
	}
}
