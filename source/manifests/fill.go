package manifests

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// filler fills API objects from nodes. It goes on after an error, so that one
// reading of a file tells everything that is wrong with it. It is as strict as
// the API server: names of fields are case-sensitive, a number is not text.
type filler struct {
	// report takes each error (or warning) with the line it belongs to and
	// the path of the field, "spec.ports[0].port".
	report func(line int, path, text string, warning bool)

	path   []step
	depth  int
	budget int // how many more nodes may be looked at; aliases make it matter
}

// step is one part of a path: a field's name, a map's key, or an index where
// name is "".
type step struct {
	name  string
	key   bool
	index int
}

func (f *filler) pathString() string {
	var b strings.Builder
	for _, s := range f.path {
		if s.name == "" {
			b.WriteString("[" + strconv.Itoa(s.index) + "]")
			continue
		}
		if s.key {
			b.WriteString("[" + shorten(s.name) + "]")
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('.')
		}
		b.WriteString(s.name)
	}
	return b.String()
}

func (f *filler) errorf(n *yaml.Node, format string, args ...any) {
	f.report(n.Line, f.pathString(), fmt.Sprintf(format, args...), false)
}

// object fills v, a pointer to an API object, from a mapping.
func (f *filler) object(n *yaml.Node, v any) {
	f.value(n, reflect.ValueOf(v).Elem())
}

// enter counts a node and follows aliases; nil means stop.
func (f *filler) enter(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		f.budget--
		n = n.Alias
	}
	f.budget--
	if f.budget < 0 {
		if f.budget > -1<<30 { // tell it once
			f.errorf(n, "the file's aliases stand for too many values")
			f.budget = -1 << 30
		}
		return nil
	}
	return n
}

func (f *filler) value(n *yaml.Node, v reflect.Value) {
	if n = f.enter(n); n == nil {
		return
	}
	if f.depth++; f.depth > maxDepth {
		f.errorf(n, "nested too deeply")
		f.depth--
		return
	}
	defer func() { f.depth-- }()

	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return // the zero value, as the API server reads null
	}
	if v.Kind() == reflect.Pointer {
		p := reflect.New(v.Type().Elem())
		f.value(n, p.Elem())
		v.Set(p)
		return
	}
	if u, ok := v.Addr().Interface().(json.Unmarshaler); ok {
		f.unmarshal(n, u)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		f.structure(n, v)
	case reflect.Slice:
		f.list(n, v)
	case reflect.Map:
		f.mapping(n, v)
	case reflect.String:
		if s, ok := f.text(n); ok {
			v.SetString(s)
		}
	case reflect.Bool:
		f.boolean(n, v)
	case reflect.Int, reflect.Int32, reflect.Int64:
		f.integer(n, v)
	default:
		f.errorf(n, "cannot be read (a %s)", v.Kind())
	}
}

// unmarshal fills a type that has its own idea of JSON: a time, a quantity, a
// target port.
func (f *filler) unmarshal(n *yaml.Node, u json.Unmarshaler) {
	if n.Kind != yaml.ScalarNode {
		f.errorf(n, "is %s where a single value is wanted", describe(n))
		return
	}
	data := []byte(n.Value)
	if n.Tag != "!!int" && n.Tag != "!!float" && n.Tag != "!!bool" {
		data, _ = json.Marshal(n.Value)
	}
	if err := u.UnmarshalJSON(data); err != nil {
		what := "a value of this field"
		switch u.(type) {
		case *metav1.Time, *metav1.MicroTime:
			what = `a time such as "2026-01-31T12:00:00Z"`
		}
		f.errorf(n, "%s is not %s", quoted(n), what)
	}
}

func (f *filler) structure(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		f.errorf(n, "is %s where a mapping of fields is wanted", describe(n))
		return
	}
	info := structInfoOf(v.Type())
	for key, val := range f.pairs(n) {
		f.path = append(f.path, step{name: key.Value})
		field, ok := info.fields[key.Value]
		switch {
		case !ok:
			f.report(key.Line, f.pathString(), "no such field"+info.suggest(key.Value), true)
		case !field.skip:
			f.value(val, v.FieldByIndex(field.index))
		}
		f.path = f.path[:len(f.path)-1]
	}
}

func (f *filler) list(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		f.errorf(n, "is %s where a list is wanted", describe(n))
		return
	}
	s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, c := range n.Content {
		f.path = append(f.path, step{index: i})
		f.value(c, s.Index(i))
		f.path = f.path[:len(f.path)-1]
	}
	v.Set(s)
}

func (f *filler) mapping(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		f.errorf(n, "is %s where a mapping is wanted", describe(n))
		return
	}
	t := v.Type()
	m := reflect.MakeMapWithSize(t, len(n.Content)/2)
	for key, val := range f.pairs(n) {
		f.path = append(f.path, step{name: key.Value, key: true})
		e := reflect.New(t.Elem()).Elem()
		f.value(val, e)
		m.SetMapIndex(reflect.ValueOf(key.Value).Convert(t.Key()), e)
		f.path = f.path[:len(f.path)-1]
	}
	v.Set(m)
}

func (f *filler) text(n *yaml.Node) (string, bool) {
	if n.Kind == yaml.ScalarNode {
		switch n.ShortTag() {
		case "!!str", "!!timestamp":
			return n.Value, true
		case "!!int", "!!float", "!!bool":
			f.errorf(n, "%s is %s, but text is wanted: put it in quotes", n.Value, describe(n))
			return "", false
		}
	}
	f.errorf(n, "is %s where text is wanted", describe(n))
	return "", false
}

func (f *filler) boolean(n *yaml.Node, v reflect.Value) {
	var b bool
	if n.Kind == yaml.ScalarNode && n.Style == 0 && n.Decode(&b) == nil {
		v.SetBool(b)
		return
	}
	f.errorf(n, "%s is not true or false", quoted(n))
}

func (f *filler) integer(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" && len(n.Value) > 0 && strings.Trim(n.Value, "0123456789") == "" {
		f.errorf(n, "%s is text, but a number is wanted: take the quotes off", quoted(n))
		return
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" {
		f.errorf(n, "%s is not a whole number", quoted(n))
		return
	}
	i, err := strconv.ParseInt(n.Value, 10, 64)
	if err != nil || n.Value[0] == '0' { // 0x1f, 0o17, 1_000 …
		err = n.Decode(&i)
	}
	if err != nil || v.OverflowInt(i) {
		f.errorf(n, "%s is too large a number", n.Value)
		return
	}
	v.SetInt(i)
}

// pairs goes through the keys and values of a mapping, those of merged
// mappings ("<<: *base") included. A key that is there twice is an error: which
// of the two was meant cannot be known.
func (f *filler) pairs(n *yaml.Node) func(yield func(key, val *yaml.Node) bool) {
	return func(yield func(key, val *yaml.Node) bool) {
		first := make(map[string]int, len(n.Content)/2)
		var merged []*yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, val := n.Content[i], n.Content[i+1]
			if key = f.enter(key); key == nil {
				return
			}
			if key.Kind != yaml.ScalarNode {
				f.errorf(key, "%s cannot be a field's name", describe(key))
				continue
			}
			if key.ShortTag() == "!!merge" {
				merged = append(merged, val)
				continue
			}
			if line, ok := first[key.Value]; ok {
				f.path = append(f.path, step{name: key.Value})
				f.errorf(key, "is here a second time (first in line %d)", line)
				f.path = f.path[:len(f.path)-1]
				continue
			}
			first[key.Value] = key.Line
			if !yield(key, val) {
				return
			}
		}
		for len(merged) > 0 {
			m := f.enter(merged[0])
			merged = merged[1:]
			if m == nil {
				return
			}
			if m.Kind == yaml.SequenceNode {
				merged = append(slices.Clone(m.Content), merged...)
				continue
			}
			if m.Kind != yaml.MappingNode {
				f.errorf(m, "%s cannot be merged, only a mapping", describe(m))
				continue
			}
			for i := 0; i+1 < len(m.Content); i += 2 {
				key, val := m.Content[i], m.Content[i+1]
				if key.ShortTag() == "!!merge" {
					merged = append(merged, val)
					continue
				}
				if _, ok := first[key.Value]; ok {
					continue
				}
				first[key.Value] = key.Line
				if !yield(key, val) {
					return
				}
			}
		}
	}
}

// describe names a node's kind for people.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!int", "!!float":
		return "a number"
	case "!!bool":
		return "a truth value"
	case "!!null":
		return "nothing"
	case "!!str":
		return "text"
	}
	return "a " + n.ShortTag()
}

// quoted gives a node's value as an error shows it.
func quoted(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		return describe(n)
	}
	if n.ShortTag() == "!!str" {
		return shorten(strconv.Quote(n.Value))
	}
	return shorten(n.Value)
}

// shorten keeps a value from filling the log.
func shorten(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// structInfo knows the JSON fields of a type.
type structInfo struct {
	fields map[string]fieldInfo
	names  []string
}

type fieldInfo struct {
	index []int
	skip  bool
}

var structInfos sync.Map // reflect.Type to *structInfo

func structInfoOf(t reflect.Type) *structInfo {
	if i, ok := structInfos.Load(t); ok {
		return i.(*structInfo)
	}
	info := &structInfo{fields: make(map[string]fieldInfo)}
	info.add(t, nil)
	slices.Sort(info.names)
	i, _ := structInfos.LoadOrStore(t, info)
	return i.(*structInfo)
}

// add takes in a struct's fields, and those of the structs that are inlined. A
// struct that is embedded but has a JSON name ("metadata") is a field.
func (i *structInfo) add(t reflect.Type, index []int) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		at := append(slices.Clone(index), f.Index...)
		switch {
		case name == "-" || !f.IsExported():
		case name == "" && f.Anonymous:
			i.add(f.Type, at)
		case name != "":
			i.fields[name] = fieldInfo{index: at, skip: unwanted(t, name)}
			i.names = append(i.names, name)
		}
	}
}

// unwanted names the fields that are large and of no use to a proxy.
func unwanted(t reflect.Type, name string) bool {
	switch t {
	case reflect.TypeFor[metav1.ObjectMeta]():
		return name == "managedFields"
	case reflect.TypeFor[corev1.NodeStatus]():
		return name == "images"
	}
	return false
}

// suggest gives ` (did you mean "targetPort"?)` when a field's name comes
// close, else "".
func (i *structInfo) suggest(name string) string {
	best, bestDistance := "", 3
	for _, n := range i.names {
		if d := distance(strings.ToLower(name), strings.ToLower(n)); d < bestDistance && d < len(n)/2 {
			best, bestDistance = n, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

// distance counts the letters that have to be added, dropped, replaced or
// swapped with their neighbour to make b from a.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	var prev2, prev, row [65]int
	for j := range len(b) {
		prev[j+1] = j + 1
	}
	prev[0] = 0
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(prev[j+1]+1, row[j]+1, prev[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], prev2[j-1]+1)
			}
		}
		prev2, prev = prev, row
	}
	return prev[len(b)]
}
