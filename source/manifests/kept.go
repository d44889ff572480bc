package manifests

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// keptFormat is that of Kept. Another one is not used.
const keptFormat = 1

// Kept is the good content of a file, which one process gives the next: that one finds an invalid
// file, and nothing of before.
type Kept struct {
	Format     int            `json:"format"`
	File       string         `json:"file"` // relative to the directory, with slashes
	Objects    []KeptObject   `json:"objects"`
	PassedOver map[string]int `json:"passed_over,omitempty"`
}

// KeptObject is an object as the API server would write it.
type KeptObject struct {
	Kind   string          `json:"kind"` // which an item of a list may not have itself
	Line   int             `json:"line"`
	Object json.RawMessage `json:"object"`
}

// Keep visits the good content of the files that are named, which may be directories with a slash
// at the end, until visit returns an error. It visits nothing if dir is another directory than
// this watcher's. Safe for concurrent use.
func (w *Watcher) Keep(dir string, names []string, visit func(*Kept) error) error {
	if dir != w.dir {
		return nil
	}
	good := make(map[string]content)
	w.mu.Lock()
	for file, st := range w.files {
		if len(st.good.objects) > 0 && slices.ContainsFunc(names, func(name string) bool {
			return file == name || strings.HasSuffix(name, "/") && strings.HasPrefix(file, name)
		}) {
			good[file] = st.good
		}
	}
	w.mu.Unlock() // objects do not change
	for _, file := range slices.Sorted(maps.Keys(good)) {
		k := Kept{Format: keptFormat, File: file, PassedOver: good[file].passedOver}
		for _, o := range good[file].objects {
			data, err := json.Marshal(o.value)
			if err != nil {
				return err
			}
			k.Objects = append(k.Objects, KeptObject{string(o.key.kind), o.line, data})
		}
		if err := visit(&k); err != nil {
			return err
		}
	}
	return nil
}

// Inherit has the first look ask for the good content of files that it cannot use, and of those that
// are empty for a moment. It is called before Run.
func (w *Watcher) Inherit(from func(dir string, names []string) []Kept) { w.inherit = from }

// takeKept makes what another process knows of files the content of before. readings are of the
// first look at the tree.
func (w *Watcher) takeKept(t tree, readings []reading) {
	var names []string
	for i := range readings {
		if r := &readings[i]; r.err != nil || r.empty || hasErrors(r.findings) {
			names = append(names, t.files[i].path)
		}
	}
	for _, dir := range t.kept {
		names = append(names, dir+"/")
	}
	if w.inherit == nil || len(names) == 0 {
		return
	}
	for _, k := range w.inherit(w.dir, names) {
		good, err := k.content(w.options)
		if err != nil {
			w.log.Warn().Err(err).Msgf("%s: its last good content, which the running sluice has, cannot be used", k.File)
			continue
		}
		w.mu.Lock()
		w.files[k.File] = &fileState{good: good}
		w.catalog.set(k.File, good.objects)
		w.mu.Unlock()
	}
}

var errFormat = errors.New("it has another format")

// content decodes the objects as if they were in a file.
func (k *Kept) content(o Options) (content, error) {
	if k.Format != keptFormat {
		return content{}, errFormat
	}
	size := 0
	for i := range k.Objects {
		size += len(k.Objects[i].Object)
	}
	d := newDecoder(k.File, size, o)
	for i := range k.Objects {
		each := &k.Objects[i]
		if err := parseJSON(each.Object, func(n *yaml.Node) {
			setLine(n, each.Line)
			d.document(n, each.Kind, 0)
		}); err != nil {
			return content{}, err
		}
	}
	d.content.passedOver = k.PassedOver
	if hasErrors(d.findings) {
		return content{}, errors.New(firstError(d.findings))
	}
	return d.content, nil
}

// setLine makes a line that of a node and of all in it.
func setLine(n *yaml.Node, line int) {
	n.Line = line
	for _, each := range n.Content {
		setLine(each, line)
	}
}
