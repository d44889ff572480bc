package conntrack

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// schema is what docs/connection-log.schema.json says of an object. It uses these
// keywords only.
type schema struct {
	Type       string             `json:"type"`
	Format     string             `json:"format"`
	Enum       []string           `json:"enum"`
	Minimum    *float64           `json:"minimum"`
	Properties map[string]*schema `json:"properties"`
	Required   []string           `json:"required"`
	Items      *schema            `json:"items"`
}

func readSchema(t *testing.T) *schema {
	t.Helper()
	text := must.Read(t, "../docs/connection-log.schema.json")
	s := new(schema)
	must.OK(t, json.Unmarshal(text, s))
	return s
}

// check reports what of a value is not as the schema says.
func (s *schema) check(t *testing.T, at string, v any) {
	t.Helper()
	kind := "object"
	switch v := v.(type) {
	case string:
		kind = "string"
		if s.Enum != nil && !slices.Contains(s.Enum, v) {
			t.Errorf("%s: %q is not one of %v", at, v, s.Enum)
		}
	case float64:
		kind = "integer"
		if s.Minimum == nil || v < *s.Minimum {
			t.Errorf("%s: %v is below the minimum", at, v)
		}
	case []any:
		kind = "array"
		for i := range v {
			s.Items.check(t, at+"[]", v[i])
		}
	case map[string]any:
		for _, name := range s.Required {
			if _, ok := v[name]; !ok {
				t.Errorf("%s: %s is missing", at, name)
			}
		}
		for name, value := range v {
			if of := s.Properties[name]; of != nil {
				of.check(t, at+"."+name, value)
			} else {
				t.Errorf("%s: %s is not in the schema", at, name)
			}
		}
	}
	if s.Type != kind {
		t.Errorf("%s is of type %s, want %s", at, kind, s.Type)
	}
}

// The schema fits the records that the code writes, names exactly the fields of the
// documentation, and all values.
func TestSchema(t *testing.T) {
	s := readSchema(t)
	var records []Record
	for _, r := range examples() {
		for _, event := range []Event{Ended, Opened, Lasts} {
			r.Event = event
			records = append(records, r)
		}
	}
	all := examples()[1]
	all.Protocol = service.UDP
	all.Event = Opened
	for line := range strings.Lines(encodeAll(t, false, append(records, all))) {
		var v any
		must.OK(t, json.Unmarshal([]byte(line), &v))
		s.check(t, "record", v)
	}
	var fields []string
	for name, of := range s.Properties {
		fields = append(fields, name)
		if of.Items != nil {
			for inner := range of.Items.Properties {
				fields = append(fields, name+"[]."+inner)
			}
		}
	}
	slices.Sort(fields)
	if documented := slices.Sorted(slices.Values(append(documentedIn(t, "## Fields of the JSON form"), documentedOfTCP(t)...))); !slices.Equal(fields, documented) {
		t.Errorf("the schema has\n%v, the documentation\n%v", fields, documented)
	}
	var ends, errors, paths, affinities []string
	for _, e := range Ends() {
		ends = append(ends, e.String())
	}
	for _, e := range DialErrors() {
		errors = append(errors, e.String())
	}
	for _, p := range Paths() {
		paths = append(paths, p.String())
	}
	for a := balancer.Affinity(0); a.String() != "unknown"; a++ {
		affinities = append(affinities, a.String())
	}
	for name, tt := range map[string]struct{ got, want []string }{
		"end":      {s.Properties["end"].Enum, ends},
		"error":    {s.Properties["failed_attempts"].Items.Properties["error"].Enum, errors},
		"path":     {s.Properties["path"].Enum, paths},
		"affinity": {s.Properties["affinity"].Enum, affinities},
		"event":    {s.Properties["event"].Enum, []string{Opened.String(), Lasts.String(), Refused.String()}},
	} {
		if !slices.Equal(tt.got, tt.want) {
			t.Errorf("%s: the schema has %v, the code %v", name, tt.got, tt.want)
		}
	}
}
