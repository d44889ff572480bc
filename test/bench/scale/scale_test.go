package scale

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// No two services and no two endpoints share an address, and all addresses lie in
// their ranges.
func TestAddresses(t *testing.T) {
	for _, size := range []Size{{1, 10}, {2, 10}, {300, 10}, published, wide, largest} {
		size.Services = race.Fewer(size.Services)
		c := &cluster{Size: size, live: netip.MustParseAddr("10.2.0.2")}
		seen := map[string]bool{}
		add := func(a string) {
			if seen[a] {
				t.Fatalf("%v: %s comes twice", size, a)
			}
			seen[a] = true
		}
		for i := range size.Services {
			if !serviceRange.Contains(vip(i)) {
				t.Fatalf("%v: %s is not in %s", size, vip(i), serviceRange)
			}
			add(vip(i).String())
		}
		total := 0
		for i := range size.Services {
			for _, e := range c.slice(i).Endpoints {
				add(e.Addresses[0])
				total++
			}
			if i < size.Services-1 {
				add(c.rolled(i, 0).Endpoints[0].Addresses[0])
			}
		}
		check.Equalf(t, total, c.endpoints(), "%v: endpoints", size)
	}
}

// The directory has the same objects as the API server.
func TestManifests(t *testing.T) {
	c := &cluster{Size: Size{250, 10}, live: netip.MustParseAddr("10.2.0.2"), nodeAddr: netip.MustParseAddr("10.1.0.1")}
	dir := t.TempDir()
	must.OK(t, c.write(dir))
	files := must.Get(filepath.Glob(filepath.Join(dir, "*")))(t)
	counts := map[string]int{}
	for _, file := range files {
		text := must.Get(os.ReadFile(file))(t)
		var list struct {
			Items []metav1.PartialObjectMetadata
		}
		must.OKf(t, json.Unmarshal(text, &list), "%s", file)
		for _, o := range list.Items {
			counts[o.Kind]++
		}
	}
	if counts["Service"] != 250 || counts["EndpointSlice"] != 250 || counts["Node"] != 1 || counts["ServiceCIDR"] != 1 {
		t.Errorf("%v in %d files", counts, len(files))
	}
}

func TestSeries(t *testing.T) {
	times := []time.Duration{5, 1, 4, 2, 3}
	got, err := series(5, func(i int) (time.Duration, error) { return times[i], nil })
	if err != nil || got != [2]time.Duration{3, 5} {
		t.Errorf("median and worst %v, %v", got, err)
	}
	check.Error(t, must.Err(series(2, func(int) (time.Duration, error) { return 0, errors.New("never") })), "number 1: never")
}

func median(ms int) [2]time.Duration {
	return [2]time.Duration{time.Duration(ms) * time.Millisecond, 50 * time.Millisecond}
}

func exampleResults() []Result {
	return []Result{
		{Mode: "tproxy/nftables", Services: 1000, Each: 10, Endpoints: 9991, Start: 218 * time.Millisecond, Endpoint: median(12), Service: median(5), RSS: 43 << 20, RSSLater: 42 << 20, CPU: 190 * time.Millisecond, CPUChange: time.Second, Changes: 100},
		{Mode: "sklookup", Services: 1000, Each: 10, Endpoints: 9991, Start: 225 * time.Millisecond, Endpoint: median(2), Service: median(5), Changes: 100},
		{Mode: "tproxy/nftables", Services: 10000, Each: 10, Endpoints: 99991, Start: 1101 * time.Millisecond, Endpoint: median(3), Service: median(5), RSS: 177 << 20, RSSLater: 137 << 20, Changes: 100},
		{Mode: "sklookup", Services: 10000, Each: 10, Error: "it does not watch | at all\nlast words"},
	}
}

func TestGoals(t *testing.T) {
	text := Goals(exampleResults())
	for _, line := range []string{
		"| | goal | tproxy/nftables | sklookup |",
		"start to first sync, ms | at most 1,500 | 1,101, met | **failed** |",
		"| … memory at the end of the start, MiB | at most 150 | 177, **missed** | **failed** |",
		"| … memory later, MiB | at most 150 | 137, met | **failed** |",
		"median, ms | at most 10 | 12.0, **missed** | **failed** |",
	} {
		check.Contains(t, text, line)
	}
	if got := Goals(exampleResults()[1:2]); strings.Count(got, "\n") != 3 || !strings.Contains(got, "|  | 2.0, met |") {
		t.Errorf("one size of one mode:\n%s", got)
	}
	rolled := []Result{{Mode: "relay", Services: 44125, Each: 1, Start: 2900 * time.Millisecond, Endpoint: median(11), Rollout: Rollout{Lag: median(99)}}}
	for _, line := range []string{"| 2,900, met |  |", "| 11.0, **missed** |", "| 99.0, met |"} {
		check.Contains(t, PublicGoals(rolled), line)
	}
	if Goals(nil) != "" {
		t.Error("nothing has goals")
	}
}

func TestShortfalls(t *testing.T) {
	text := Shortfalls(Goals(exampleResults()))
	if !strings.HasPrefix(text, "Of 8 goals, 2 are met.\n\n| | goal |") || strings.Count(text, "\n") != 8 {
		t.Errorf("with goals that are missed:\n%s", text)
	}
	check.Equalf(t, Shortfalls(Goals(exampleResults()[1:2])), "Of 1 goals, 1 are met.\n", "with one, which is met")
}

func TestLargestSizeOfEachMode(t *testing.T) {
	results := exampleResults()
	if got := Largest(results); len(got) != 2 || got[0].Services != 10000 || got[1].Services != 10000 {
		t.Errorf("the largest of two modes are %v", got)
	}
}

func TestTable(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(Table(exampleResults())), "\n")
	must.Equalf(t, len(lines), 6, "lines")
	for _, line := range lines {
		if strings.Count(line, "|") != strings.Count(lines[0], "|") {
			t.Errorf("a row with other columns: %s", line)
		}
	}
	for i, want := range map[int]string{
		2: "| 1,000 | tproxy/nftables | 218 | 0.19 | 43 | 42 | 12.0 (50.0) | 5.0 (50.0) | 10.0 |",
		5: "| 10,000 | sklookup | it does not watch / at all | | | | | | |",
	} {
		if lines[i] != want {
			t.Errorf("row %d\n%s, want\n%s", i, lines[i], want)
		}
	}
}

func TestChart(t *testing.T) {
	decoder, lines := xml.NewDecoder(strings.NewReader(Chart(exampleResults()))), 0
	for {
		token, err := decoder.Token()
		if err == io.EOF {
			break
		}
		must.OK(t, err)
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 4 {
		t.Errorf("%d lines, want two for each of two modes", lines)
	}
}
