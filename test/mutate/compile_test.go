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
	"github.com/sluice-proxy/sluice/test/race"
)

// listed is a package as go list prints it.
type listed struct {
	Dir, ImportPath, Export string
	GoFiles                 []string
	declared                map[string]*ast.File // by name: what a file declares, without bodies
}

// declarations returns what the files of a package declare.
func (p *listed) declarations(t *testing.T, files *token.FileSet) map[string]*ast.File {
	if p.declared != nil {
		return p.declared
	}
	p.declared = make(map[string]*ast.File)
	for _, name := range p.GoFiles {
		f := must.Get(parser.ParseFile(files, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution))(t)
		for _, d := range f.Decls {
			if function, is := d.(*ast.FuncDecl); is {
				function.Body = nil
			}
		}
		p.declared[name] = f
	}
	return p.declared
}

// TestEachMutationCompiles finds mutations that prove nothing without a run of each: a mistake in the
// product has to have the right types. It checks the mutated file against what the others declare.
func TestEachMutationCompiles(t *testing.T) {
	list := exec.Command("go", "list", "-deps", "-export", "-json=Dir,ImportPath,Export,GoFiles")
	for i := range mutations {
		if m := &mutations[i]; strings.HasSuffix(m.file, ".go") {
			list.Args = append(list.Args, "./"+m.place())
		}
	}
	list.Dir = root
	list.Env = append(os.Environ(), "CGO_ENABLED=0") // as the other builds, whose results it finds in the cache
	byPath, byDir := make(map[string]*listed), make(map[string]*listed)
	for out := json.NewDecoder(bytes.NewReader(must.Get(list.Output())(t))); ; {
		p := new(listed)
		err := out.Decode(p)
		if errors.Is(err, io.EOF) {
			break
		}
		must.OK(t, err)
		byPath[p.ImportPath], byDir[p.Dir] = p, p
	}
	files := token.NewFileSet()
	known := importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) { return os.Open(byPath[path].Export) })
	top := must.Get(filepath.Abs(root))(t)
	for i := range race.Fewer(len(mutations)) {
		m := &mutations[i]
		if !strings.HasSuffix(m.file, ".go") {
			continue
		}
		p := byDir[filepath.Join(top, m.place())]
		path := filepath.Join(top, m.file)
		mutated, err := parser.ParseFile(files, path, must.Get(m.mutated(root))(t), parser.SkipObjectResolution)
		all := []*ast.File{mutated}
		for name, f := range p.declarations(t, files) {
			if name != filepath.Base(path) {
				all = append(all, f)
			}
		}
		config := &types.Config{Importer: known, Error: func(e error) {
			if f, is := errors.AsType[types.Error](e); err == nil && is && files.Position(f.Pos).Filename == path {
				err = e
			}
		}}
		if err == nil {
			_, _ = config.Check(p.ImportPath, files, all, nil) // it calls Error
		}
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
