package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// listed is a package as go list prints it.
type listed struct {
	Dir, ImportPath, Export string
	GoFiles                 []string
}

// TestEachMutationCompiles finds mutations that prove nothing without a run of each: a mistake in the
// product has to have the right types.
func TestEachMutationCompiles(t *testing.T) {
	places := make(map[string]bool)
	for i := range mutations {
		if m := &mutations[i]; strings.HasSuffix(m.file, ".go") {
			places["./"+m.place()] = true
		}
	}
	list := exec.Command("go", "list", "-deps", "-export", "-json=Dir,ImportPath,Export,GoFiles")
	for place := range places {
		list.Args = append(list.Args, place)
	}
	list.Dir = root
	packages := make(map[string]*listed)
	byDir := make(map[string]*listed)
	for out := json.NewDecoder(bytes.NewReader(must.Get(list.Output())(t))); ; {
		p := new(listed)
		if err := out.Decode(p); errors.Is(err, io.EOF) {
			break
		} else {
			must.OK(t, err)
		}
		packages[p.ImportPath], byDir[p.Dir] = p, p
	}
	files := token.NewFileSet()
	known := importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) { return os.Open(packages[path].Export) })
	top := must.Get(filepath.Abs(root))(t)
	for i := range mutations {
		m := &mutations[i]
		if !strings.HasSuffix(m.file, ".go") {
			continue
		}
		text := must.Get(m.mutated(root))(t)
		p := byDir[filepath.Join(top, m.place())]
		var all []*ast.File
		for _, name := range p.GoFiles {
			var from any
			if name == filepath.Base(m.file) {
				from = text
			}
			f, err := parser.ParseFile(files, filepath.Join(p.Dir, name), from, parser.SkipObjectResolution)
			if err != nil {
				t.Errorf("%s: %v", m.name, err)
				continue
			}
			all = append(all, f)
		}
		if _, err := (&types.Config{Importer: known}).Check(p.ImportPath, files, all, nil); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
