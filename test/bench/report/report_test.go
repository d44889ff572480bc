package report

import (
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   Spread
	}{
		{[]float64{3}, Spread{3, 3, 3}},
		{[]float64{3, 1}, Spread{2, 1.5, 2.5}},
		{[]float64{3, 1, 2}, Spread{2, 1.5, 2.5}},
		{[]float64{4, 1, math.NaN(), 3, 2}, Spread{2.5, 1.75, 3.25}},
		{[]float64{5, 5, 1, 100, 5}, Spread{5, 5, 5}},
	} {
		if got, ok := spread(c.values); !ok || got != c.want {
			t.Errorf("%v: %v, want %v", c.values, got, c.want)
		}
	}
	if _, ok := spread([]float64{math.NaN()}); ok {
		t.Error("no values have a median")
	}
}

func TestNumber(t *testing.T) {
	for _, c := range []struct {
		v    float64
		want string
	}{
		{0, "0"}, {2, "2"}, {0.1234, "0.123"}, {1.234, "1.23"}, {45.678, "45.7"},
		{999.6, "1,000"}, {1234567, "1,234,567"}, {-1234, "-1,234"}, {100.4, "100"}, {math.NaN(), "–"},
	} {
		check.Equalf(t, Number(c.v), c.want, "Number(%v)", c.v)
	}
}

func example() *Data {
	d := &Data{
		Environment: Environment{Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Kernel: "6.18", Architecture: "amd64", CPU: "a <fast> one", CPUs: 2, Go: "go1.26", IPVersion: 4, Congestion: "cubic"},
		Rounds:      3, Seconds: 3,
		Peers: []Peer{{Name: "direct"}, {Name: "haproxy", Version: "2.6"}, {Name: "nginx", Missing: "not installed | at all"}, {Name: "sluice"}, {Name: "sluice-nolog", Variant: true}},
	}
	for round, v := range []float64{10, 20, 30} {
		d.Add(round, "direct", "bulk1.rate", 2*v)
		d.Add(round, "haproxy", "bulk1.rate", v)
		d.Add(round, "sluice", "bulk1.rate", 1.6*v)
		d.Add(round, "haproxy", "rr1.p50", 50)
		d.Add(round, "sluice", "rr1.p50", 60)
		d.Add(round, "sluice", "idle.fds", 2)
	}
	d.Add(1, "sluice-nolog", "crc.rate", 900)
	d.Add(2, "sluice", "crc.rate", 900)
	d.Add(0, "sluice", "crc.rate", math.NaN())
	return d
}

func TestSeriesAndRatio(t *testing.T) {
	d := example()
	if s, ok := d.Spread("sluice", "bulk1.rate"); !ok || s != (Spread{32, 24, 40}) {
		t.Errorf("spread %+v, %v", s, ok)
	}
	if r, ok := d.Ratio("sluice", "haproxy", "bulk1.rate"); !ok || math.Abs(r.Median-1.6) > 1e-9 {
		t.Errorf("ratio %v, %v", r, ok)
	}
	if _, ok := d.Ratio("sluice", "sluice-nolog", "crc.rate"); ok {
		t.Error("figures of different rounds have a ratio")
	}
	if _, ok := d.Spread("nginx", "bulk1.rate"); ok {
		t.Error("a peer that did not run has figures")
	}
}

func TestJudge(t *testing.T) {
	found := map[string]string{}
	for _, o := range example().Judge() {
		found[o.Goal.Title+", "+o.Goal.Wanted()] = o.Words() + ", " + string(o.Verdict)
	}
	for goal, want := range map[string]string{
		"bulk, 1 stream, at least 1.50 x haproxy":                                  "1.60 x, met",
		"bulk, 1 stream, at least 0.75 x direct":                                   "0.80 x, met",
		"request-response, 1 client, p50, at most 1.00 x haproxy":                  "1.20 x, missed",
		"descriptors for each idle connection, at most 2":                          "2, met",
		"… with the access log, ratio to without, at least 0.95 x sluice-nolog":    ", not measured", // not in one round
		"memory for each idle connection, bytes, at most 1,024":                    "",               // its column was not measured
		"connect-request-close, 32 clients, at least 1.15 x haproxy":               ", not measured",
		"… with the client's address, ratio to the node's, at least 0.90 x sluice": "", // nobody took part
	} {
		if found[goal] != want {
			t.Errorf("%s: %q, want %q", goal, found[goal], want)
		}
	}
}

// A goal is met or missed only if three quarters of the rounds agree.
func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		atLeast bool
		found   Spread
		want    Verdict
	}{
		{true, Spread{2, 1.5, 2.5}, Met},
		{true, Spread{2, 1, 2.5}, Met},
		{true, Spread{1.2, 0.9, 1.3}, Unclear},
		{true, Spread{0.95, 0.9, 1}, Unclear},
		{true, Spread{0.9, 0.8, 0.99}, Missed},
		{false, Spread{0.9, 0.8, 1}, Met},
		{false, Spread{0.9, 0.8, 1.01}, Unclear},
		{false, Spread{1.2, 1, 1.3}, Unclear},
		{false, Spread{1.2, 1.1, 1.3}, Missed},
	} {
		g := Goal{AtLeast: c.atLeast, Bound: 1}
		check.Equalf(t, g.verdict(c.found), c.want, "%s, found %v", g.Wanted(), c.found)
	}
}

// A row names its parent if that is not above it.
func TestNames(t *testing.T) {
	byID := map[string]Metric{}
	for _, m := range Metrics {
		byID[m.ID] = m
	}
	for _, c := range []struct{ id, below, want string }{
		{"rr64.rate", "", "request-response, 64 clients [/s]"},
		{"rr64.p99", "request-response, 64 clients", "… p99 [us]"},
		{"rr64.p99", "", "request-response, 64 clients, p99 [us]"},
		{"rr64.p99", "request-response, 1 client, p50", "request-response, 64 clients, p99 [us]"},
		{"idle.fds", "memory for each idle connection", "… descriptors"},
	} {
		check.Equalf(t, byID[c.id].name(c.below), c.want, "%s below %q", c.id, c.below)
	}
}

// What must not happen must not happen once.
func TestOneLossIsOneTooMany(t *testing.T) {
	d := &Data{Peers: []Peer{{Name: "sluice"}}}
	for round, lost := range []float64{0, 0, 3, 0, 0} {
		d.Add(round, "sluice", "udp-flood.lost", lost)
	}
	outcomes := d.Judge()
	if len(outcomes) != 1 || outcomes[0].Verdict != Missed || outcomes[0].Words() != "3" {
		t.Errorf("%+v", outcomes)
	}
}

// The slowest steering mode is compared with the fastest.
func TestWaysOfSteering(t *testing.T) {
	d := &Data{}
	for i, name := range steering {
		d.Peers = append(d.Peers, Peer{Name: name, Variant: true})
		for round := range 3 {
			d.Add(round, name, "rr64.rate", float64(1000+round)*float64(10-i))
		}
	}
	outcomes := d.Judge()
	if len(outcomes) != 1 || outcomes[0].Words() != "0.70 x: sluice-bind, sluice-nftables" || outcomes[0].Verdict != Missed {
		t.Errorf("%+v", outcomes)
	}
	d.Peers = d.Peers[:1]
	d.Samples = d.Samples[:3]
	if outcomes := d.Judge(); len(outcomes) != 0 {
		t.Errorf("one way has a slowest and a fastest: %+v", outcomes)
	}
}

// Every goal names a metric and peers that exist.
func TestGoalsNameMetrics(t *testing.T) {
	known := map[string]bool{}
	for _, m := range Metrics {
		if known[m.ID] {
			t.Errorf("metric %s is there twice", m.ID)
		}
		known[m.ID] = true
		if n := len([]rune(m.full())); m.Chart && n > 60 {
			t.Errorf("%q is too long for the chart by %d", m.full(), n-60)
		}
	}
	for _, g := range Goals {
		if !known[g.Metric] {
			t.Errorf("goal %q speaks of %s", g.Title, g.Metric)
		}
	}
}

func TestMarkdown(t *testing.T) {
	text := example().Markdown()
	for _, line := range []string{
		"**TCP, figures: median",
		"| | direct | haproxy | sluice |",
		"| bulk, 1 stream [Gbit/s] | 40 ±25% | 20 ±25% | 32 ±25% |",
		"| request-response, 1 client, p50 [us] |  | 50 | 60 |",
		"| bulk, 1 stream [Gbit/s] | 0.80 | 1.60 |",
		"nginx did not run: not installed | at all",
		"Measured 2026-01-02 03:04 UTC on Linux 6.18, amd64, 2 x a <fast> one, IPv4, TCP cubic, go1.26, haproxy 2.6; 3 rounds of 3 s.",
		"| bulk, 1 stream | at least 1.50 x haproxy | 1.60 x | met |",
		"| request-response, 1 client, p50 | at most 1.00 x haproxy | 1.20 x | **missed** |",
	} {
		if !strings.Contains(text, line+"\n") && !strings.Contains(text, line) {
			t.Errorf("the page lacks\n%s\nin\n%s", line, text)
		}
	}
	columns := -1
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "|") {
			columns = -1
			continue
		}
		n := strings.Count(strings.ReplaceAll(line, "\\|", ""), "|")
		if columns >= 0 && n != columns {
			t.Errorf("a table's row has %d bars, the one above %d: %s", n, columns, line)
		}
		columns = n
	}
}

func TestInsert(t *testing.T) {
	const begin, end = "<!-- x:begin: do not edit -->", "<!-- x:end -->"
	page := "before\n" + begin + "\nold\n" + end + "\nafter\n"
	got, err := Insert(page, "x", "new\n")
	want := "before\n" + begin + "\n\nnew\n\n" + end + "\nafter\n"
	if err != nil || got != want {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := Insert(page, "y", "new"); err == nil {
		t.Error("a page without this part is no error")
	}
	if again, err := Insert(got, "x", "new"); err != nil || again != want {
		t.Errorf("inserting the same again gives %q, %v", again, err)
	}
	if _, err := Insert("no lines", "x", "new"); err == nil {
		t.Error("a page without the lines is no error")
	}
	if _, err := Insert("only "+begin+"\n", "x", "new"); err == nil {
		t.Error("a page without the last line is no error")
	}
}

func TestChart(t *testing.T) {
	d := example()
	chart := d.Chart()
	decoder := xml.NewDecoder(strings.NewReader(chart))
	bars := 0
	for {
		token, err := decoder.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("the chart is not XML: %v\n%s", err, chart)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "rect" {
			bars++
		}
	}
	// bulk1 has three peers, rr1.p50 two, crc.rate one; and the background.
	if bars != 7 {
		t.Errorf("%d rectangles, want 7", bars)
	}
	if (&Data{}).Chart() != "" {
		t.Error("no figures have a chart")
	}
}

func TestJSON(t *testing.T) {
	d := example()
	text := must.Get(d.JSON())(t)
	var doc struct {
		Environment Environment
		Peers       []Peer
		Rounds      int
		Notes       []string
		Results     map[string]map[string][]*float64
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if doc.Rounds != 3 || doc.Environment.Kernel != "6.18" || len(doc.Peers) != 5 || doc.Notes == nil {
		t.Errorf("%+v", doc)
	}
	if got := doc.Results["bulk1.rate"]["sluice"]; len(got) != 3 || *got[2] != 48 {
		t.Errorf("bulk1.rate of sluice: %v", got)
	}
	// Figures of the third round only.
	if got := doc.Results["crc.rate"]["sluice"]; len(got) != 3 || got[0] != nil || *got[2] != 900 {
		t.Errorf("crc.rate of sluice: %v", got)
	}
	if _, ok := doc.Results["bulk1.rate"]["nginx"]; ok {
		t.Error("a peer that did not run has figures")
	}
}

func TestParse(t *testing.T) {
	d := example()
	text := must.Get(d.JSON())(t)
	read := must.Get(Parse(text))(t)
	if got, want := read.Markdown(), d.Markdown(); got != want {
		t.Errorf("what was read says\n%s\nwhat was written\n%s", got, want)
	}
	if _, err := Parse([]byte("{")); err == nil {
		t.Error("half a document is no error")
	}
}

func TestRoundTo4(t *testing.T) {
	for _, c := range [][2]float64{{0, 0}, {123456, 123500}, {0.00123456, 0.001235}, {-98765, -98770}, {1, 1}} {
		if got := roundTo4(c[0]); math.Abs(got-c[1]) > 1e-12 {
			t.Errorf("roundTo4(%v) = %v, want %v", c[0], got, c[1])
		}
	}
}

// Variants of Sluice have a table of their own.
func TestVariants(t *testing.T) {
	d := example()
	d.Peers = append(d.Peers, Peer{Name: "sluice-bind", Variant: true})
	d.Add(0, "sluice", "rr64.rate", 1000)
	d.Add(0, "sluice-bind", "rr64.rate", 950)
	text := d.Markdown()
	for _, want := range []string{"| | direct | haproxy | sluice |", "| | sluice-bind |", "| 950, 0.95 x |"} {
		check.Contains(t, text, want)
	}
	if strings.Contains(d.Chart(), "sluice-bind") {
		t.Error("a variant has bars in the chart")
	}
}

// The kernel's data path has ratios of its own, beside those of the relay.
func TestKernelFlowsHaveRatios(t *testing.T) {
	d := example()
	d.Peers = append(d.Peers, Peer{Name: "sluice-kernel"})
	for round, rate := range []float64{900, 950, 1000} {
		d.Add(round, "direct", "crc.rate", 1000)
		d.Add(round, "sluice-kernel", "crc.rate", rate)
	}
	text := d.Markdown()
	_, ratios, ok := strings.Cut(text, "ratio of Sluice's kernel flows to each peer")
	if !ok || !strings.Contains(ratios, "/s] | 0.95 |") || !strings.Contains(text, "| … connect-request-close, 32 clients | at least 0.90 x direct | 0.95 x") {
		t.Errorf("no ratio, or no goal, of kernel flows:\n%s", text)
	}
}

// The page's costs are in microseconds and milliseconds of one operation; peers without any
// have no row.
func TestCosts(t *testing.T) {
	d := &Data{Peers: []Peer{{Name: "direct"}, {Name: "sluice"}, {Name: "sluice-base", Variant: true}, {Name: "rates"}}}
	for peer, factor := range map[string]float64{"direct": 1, "sluice": 2, "sluice-base": 3} {
		d.Add(0, peer, "crc.machine", 4*factor)
		d.Add(0, peer, "bulk1.machine", 0.2*factor)
	}
	d.Add(0, "sluice", "crc.cpu", 0.25)
	d.Add(0, "rates", "crc.rate", 1)
	_, rows, _ := strings.Cut(d.Costs(), "---:|\n")
	if want := "| direct | 40 | | 200 | |\n| sluice | 80 (2.50) | | 400 | |\n"; rows != want {
		t.Errorf("got\n%swant\n%s", rows, want)
	}
}

// The page has a row for each peer, and columns only of what was measured.
func TestPage(t *testing.T) {
	d := example()
	d.Notes = []string{"round 1: a note"}
	_, table, _ := strings.Cut(d.Page(), "\n\n")
	want := `| | bulk, 1 stream [Gbit/s] | p50 of a request, 1 client [us] | connections with a request [/s] |
|---|---:|---:|---:|
| direct | 40 | | |
| haproxy | 20 | 50 | |
| sluice | 32 | 60 | 900 |

Notes of this run:

- round 1: a note

`
	if !strings.HasSuffix(d.Page(), want) {
		t.Errorf("got\n%s\nwant\n%s", table, want)
	}
}

// The page names the goals that are not met, with their columns' whole names.
func TestShortfalls(t *testing.T) {
	d := example()
	d.Add(0, "sluice", "steady.failed", 3)
	text := d.Shortfalls()
	for _, want := range []string{
		"Of 8 goals, 3 are met and 0 unclear.\n",
		"\n| sluice | request-response, 1 client, p50 | at most 1.00 x haproxy | 1.20 x | **missed** |\n",
		"\n| sluice | connect-request-close, long run, server closes first, connections that failed | at most 0 | 3 | **missed** |\n",
		"\n| sluice | connect-request-close, 32 clients, server closes first | at least 0.95 x sluice-nolog |  | not measured |\n",
	} {
		check.Contains(t, text, want)
	}
	d.Samples = nil
	d.Add(0, "sluice", "idle.fds", 2)
	check.Equalf(t, d.Shortfalls(), "Of 1 goals, 1 are met and 0 unclear.\n", "with one goal, which is met")
}
