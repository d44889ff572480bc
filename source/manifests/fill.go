package manifests

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"sigs.k8s.io/json"
)

// filler decodes API objects from nodes: it encodes them as JSON and has the API
// server's decoder judge that. Names of fields are case-sensitive, a number is
// not text. The decoder stops at the first value of a wrong type and does not
// say where it is; filler finds the value, reads it as null and goes on, so that
// one reading of a file names everything that is wrong with it.
type filler struct {
	// report takes each error or warning with its line and the path of the
	// field, "spec.ports[0].port".
	report func(line int, path, text string, warning bool)
	budget int // bytes of JSON that the file may still become; bounds aliases
}

// enter follows aliases; nil means stop.
func (f *filler) enter(n *yaml.Node) *yaml.Node {
	n = follow(n)
	if f.budget--; f.budget < 0 {
		if f.budget > -1<<30 { // report it once
			f.report(n.Line, "", errTooMany.Error(), false)
			f.budget = -1 << 30
		}
		return nil
	}
	return n
}

// object fills v, a pointer to an API object, from a mapping.
func (f *filler) object(n *yaml.Node, v any) {
	e := encoder{limit: f.budget, keep: -1, wrong: map[*yaml.Node]bool{}}
	for range maxFindings {
		fault := e.encode(n)
		f.budget = min(f.budget, e.limit-len(e.json))
		if fault == nil {
			strict, err := json.UnmarshalStrict(e.json, v)
			if err == nil {
				f.reportStrict(n, v, strict)
				return
			}
			fault = e.find(n, v)
		}
		f.report(e.last.Line, shorten(string(e.path)), fault.Error(), false)
		e.wrong[e.last] = true
	}
}

// reportStrict reports fields that do not exist or are there twice. Which of two
// was meant cannot be known.
func (f *filler) reportStrict(n *yaml.Node, v any, strict []error) {
	for _, err := range strict {
		var field json.FieldError
		if !errors.As(err, &field) {
			continue
		}
		path := field.FieldPath()
		if strings.HasPrefix(err.Error(), "duplicate") {
			f.report(lineOf(n, path), path, "is here a second time: keep one of them", false)
			continue
		}
		text, near := "no such field", suggest(reflect.TypeOf(v), path)
		if near != "" {
			text += fmt.Sprintf("; did you mean %q?", near)
		}
		f.report(lineOf(n, path), path, text, !slices.Contains(restricting, near))
	}
}

// encoder encodes nodes as JSON, with aliases and merged mappings ("<<: *base")
// in place.
type encoder struct {
	limit int                 // of the length of json
	keep  int                 // values that are encoded; those behind them become null; -1 for all
	wrong map[*yaml.Node]bool // these become null too

	json   []byte
	open   []*yaml.Node // the mappings and lists that are being encoded
	count  int          // values so far
	last   *yaml.Node   // the last value that was kept, or where an error is
	path   []byte       // of last
	failed bool         // last and path are those of an error
}

var (
	errTooMany = errors.New("the file's aliases stand for too many values")
	errTooDeep = errors.New("nested too deeply")
	errLoop    = errors.New("the alias stands for what it is in")
)

func (e *encoder) encode(n *yaml.Node) error {
	e.json, e.open, e.path, e.count, e.failed = e.json[:0], e.open[:0], e.path[:0], 0, false
	return e.value(n, nil)
}

// find says why the decoder does not take the first value that it does not take:
// the last one of the shortest beginning of the object that fails.
func (e *encoder) find(n *yaml.Node, v any) (err error) {
	fails := func(i int) bool {
		e.keep = i + 1
		if err = e.encode(n); err == nil {
			err = json.UnmarshalCaseSensitivePreserveInts(e.json, v)
		}
		return err != nil
	}
	fails(sort.Search(e.count-1, fails))
	e.keep = -1
	return typeFault(e.last, err)
}

func (e *encoder) value(n *yaml.Node, path []byte) error {
	n = follow(n)
	kept := e.keep < 0 || e.count < e.keep
	if e.count++; !kept || e.wrong[n] {
		e.json = append(e.json, "null"...)
		return nil
	}
	if e.keep >= 0 {
		e.last, e.path = n, append(e.path[:0], path...)
	}
	var err error
	switch {
	case len(e.open) > maxDepth:
		err = errTooDeep
	case len(e.json) > e.limit:
		err = errTooMany
	case n.Kind == yaml.ScalarNode:
		err = e.scalar(n)
	case slices.Contains(e.open, n):
		err = errLoop
	default:
		e.open = append(e.open, n)
		if n.Kind == yaml.MappingNode {
			err = e.mapping(n, path)
		} else {
			err = e.list(n, path)
		}
		e.open = e.open[:len(e.open)-1]
	}
	if err != nil && !e.failed {
		e.failed, e.last, e.path = true, n, append(e.path[:0], path...)
	}
	return err
}

func (e *encoder) list(n *yaml.Node, path []byte) error {
	e.json = append(e.json, '[')
	for i, c := range n.Content {
		e.comma(i)
		at := append(strconv.AppendInt(append(path, '['), int64(i), 10), ']')
		if err := e.value(c, at); err != nil {
			return err
		}
	}
	e.json = append(e.json, ']')
	return nil
}

func (e *encoder) mapping(n *yaml.Node, path []byte) error {
	pairs, err := merged(n, 0)
	if err != nil {
		return err
	}
	e.json = append(e.json, '{')
	for i := 0; i+1 < len(pairs); i += 2 {
		key := follow(pairs[i])
		if key.Kind != yaml.ScalarNode {
			return fmt.Errorf("%s cannot be a field's name", describe(key))
		}
		e.comma(i)
		e.text(key.Value)
		e.json = append(e.json, ':')
		if err := e.value(pairs[i+1], appendName(path, key.Value)); err != nil {
			return err
		}
	}
	e.json = append(e.json, '}')
	return nil
}

// merged returns a mapping's keys and values in turn, those of merged mappings
// behind its own.
func merged(n *yaml.Node, depth int) ([]*yaml.Node, error) {
	isMerge := func(n *yaml.Node) bool { return n.Value == "<<" && n.ShortTag() == "!!merge" }
	if !slices.ContainsFunc(n.Content, isMerge) {
		return n.Content, nil
	}
	if depth > maxDepth {
		return nil, errTooDeep
	}
	var own, bases []*yaml.Node
	has := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		if !isMerge(n.Content[i]) {
			own = append(own, n.Content[i], n.Content[i+1])
			has[n.Content[i].Value] = true
		} else if base := follow(n.Content[i+1]); base.Kind == yaml.SequenceNode {
			bases = append(bases, base.Content...)
		} else {
			bases = append(bases, base)
		}
	}
	for _, base := range bases {
		if base = follow(base); base.Kind != yaml.MappingNode {
			return nil, fmt.Errorf("%s cannot be merged, only a mapping", describe(base))
		}
		more, err := merged(base, depth+1)
		if err != nil {
			return nil, err
		}
		for i := 0; i+1 < len(more); i += 2 {
			if key := more[i].Value; !has[key] {
				has[key] = true
				own = append(own, more[i], more[i+1])
			}
		}
	}
	return own, nil
}

// scalar encodes a single value as kubectl does: unquoted text such as yes is a
// truth value.
func (e *encoder) scalar(n *yaml.Node) error {
	switch tag := n.ShortTag(); {
	case tag == "!!null":
		e.json = append(e.json, "null"...)
	case (tag == "!!int" || tag == "!!float") && stdjson.Valid([]byte(n.Value)):
		e.json = append(e.json, n.Value...)
	case tag == "!!int", tag == "!!float", tag == "!!bool":
		var v any
		if err := n.Decode(&v); err != nil {
			return fmt.Errorf("%s cannot be read", quoted(n))
		}
		data, err := stdjson.Marshal(v)
		if err != nil {
			return fmt.Errorf("%s is not a number that JSON knows", quoted(n))
		}
		e.json = append(e.json, data...)
	case isWord(n, "yes", "on"):
		e.json = append(e.json, "true"...)
	case isWord(n, "no", "off"):
		e.json = append(e.json, "false"...)
	case tag == "!!str", tag == "!!timestamp":
		e.text(n.Value)
	default:
		return fmt.Errorf("is %s where text, a number or a truth value is wanted", describe(n))
	}
	return nil
}

// isWord reports whether a node is one of the words, without quotes: yes, Yes, YES.
func isWord(n *yaml.Node, words ...string) bool {
	return n.Style == 0 && n.Kind == yaml.ScalarNode && len(n.Value) <= 3 && slices.ContainsFunc(words, func(w string) bool {
		return n.Value == w || n.Value == strings.ToUpper(w) || n.Value == strings.ToUpper(w[:1])+w[1:]
	})
}

func (e *encoder) comma(i int) {
	if i > 0 {
		e.json = append(e.json, ',')
	}
}

func (e *encoder) text(s string) {
	if strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) < 0 {
		e.json = append(append(append(e.json, '"'), s...), '"')
		return
	}
	data, _ := stdjson.Marshal(s) // a string has no error
	e.json = append(e.json, data...)
}

// appendName adds a name to a path: ".ports", "[app.kubernetes.io/name]".
func appendName(path []byte, name string) []byte {
	if strings.ContainsAny(name, "./[] ") {
		return append(append(append(path, '['), shorten(name)...), ']')
	}
	if len(path) > 0 {
		path = append(path, '.')
	}
	return append(path, shorten(name)...)
}

// typeFault says why the decoder does not take a value.
func typeFault(n *yaml.Node, err error) error {
	var wrong *stdjson.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return fmt.Errorf("%s: %s", quoted(n), shorten(err.Error())) // from a type with a decoder of its own: a time, a quantity
	}
	var wanted, hint string
	switch wrong.Type.Kind() {
	case reflect.String:
		if wanted = "text"; n.Kind == yaml.ScalarNode {
			hint = ": put it in quotes"
		}
	case reflect.Bool:
		wanted = "true or false"
	case reflect.Slice:
		wanted = "a list"
	case reflect.Struct, reflect.Map:
		wanted = "a mapping"
	default:
		wanted = fmt.Sprintf("a whole number of %d bits", 8*wrong.Type.Size())
		if _, err := strconv.ParseUint(n.Value, 10, 16); err == nil {
			hint = ": take the quotes off"
		}
	}
	if n.Kind == yaml.ScalarNode {
		return fmt.Errorf("%s is %s where %s is wanted%s", quoted(n), describe(n), wanted, hint)
	}
	return fmt.Errorf("is %s where %s is wanted", describe(n), wanted)
}

// describe names a node's kind for people.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch tag := n.ShortTag(); {
	case tag == "!!int", tag == "!!float":
		return "a number"
	case tag == "!!bool", isWord(n, "yes", "on", "no", "off"):
		return "a truth value"
	case tag == "!!null":
		return "nothing"
	case tag == "!!str":
		return "text"
	default:
		return "a " + shorten(tag)
	}
}

// quoted returns a node's value as an error shows it.
func quoted(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		return describe(n)
	}
	if describe(n) == "text" {
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
