package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
)

// JSON writes a run as a JSON document: the fields environment, peers, rounds,
// seconds_per_measurement, notes, and results. results has for each metric and
// peer a list of figures, one for each round, null without a figure. Each metric
// has one line, so that a diff can compare two runs.
func (d *Data) JSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("{\n")
	for _, field := range []struct {
		name  string
		value any
	}{
		{"environment", d.Environment},
		{"peers", d.Peers},
		{"rounds", d.Rounds},
		{"seconds_per_measurement", d.Seconds},
		{"notes", append([]string{}, d.Notes...)},
	} {
		if err := writeField(&b, "  ", field.name, field.value); err != nil {
			return nil, err
		}
		b.WriteString(",\n")
	}
	b.WriteString("  \"results\": {")
	for i, metric := range d.metrics() {
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n")
		if err := writeField(&b, "    ", metric, d.results(metric)); err != nil {
			return nil, err
		}
	}
	b.WriteString("\n  }\n}\n")
	return b.Bytes(), nil
}

// Parse reads the output of JSON; figures have its digits.
func Parse(text []byte) (*Data, error) {
	var doc struct {
		Environment Environment
		Peers       []Peer
		Rounds      int
		Seconds     float64 `json:"seconds_per_measurement"`
		Notes       []string
		Results     map[string]map[string][]*float64
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	d := &Data{Environment: doc.Environment, Peers: doc.Peers, Rounds: doc.Rounds, Seconds: doc.Seconds, Notes: doc.Notes}
	for _, metric := range slices.Sorted(maps.Keys(doc.Results)) {
		for _, p := range d.Peers {
			for round, v := range doc.Results[metric][p.Name] {
				if v != nil {
					d.Add(round, p.Name, metric, *v)
				}
			}
		}
	}
	return d, nil
}

func writeField(b *bytes.Buffer, indent, name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(b, "%s%q: %s", indent, name, text)
	return nil
}

// metrics lists the metrics that have figures, by name.
func (d *Data) metrics() []string {
	var names []string
	for _, s := range d.Samples {
		names = append(names, s.Metric)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// results returns a metric's figures by peer.
func (d *Data) results(metric string) map[string][]*float64 {
	results := map[string][]*float64{}
	for _, p := range d.Peers {
		for _, v := range d.Series(p.Name, metric) {
			if math.IsNaN(v) {
				results[p.Name] = append(results[p.Name], nil)
				continue
			}
			rounded := roundTo4(v)
			results[p.Name] = append(results[p.Name], &rounded)
		}
	}
	return results
}

// roundTo4 keeps four significant digits; no measurement is more precise.
func roundTo4(v float64) float64 {
	if v == 0 {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}
