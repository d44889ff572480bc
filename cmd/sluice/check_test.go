package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// mistake is an entry of testdata/mistakes.txt.
type mistake struct {
	name  string
	files map[string]string
	lines []string // "web.yaml:7", that findings must name; or files
}

func readMistakes(t *testing.T) (list []mistake) {
	t.Helper()
	text := must.Read(t, "testdata/mistakes.txt")
	for _, entry := range strings.Split(string(text), "\n== ")[1:] {
		name, rest, _ := strings.Cut(entry, "\n")
		m := mistake{name: name, files: make(map[string]string)}
		for _, part := range strings.Split("\n"+rest, "\n-- ")[1:] {
			file, content, _ := strings.Cut(part, " --\n")
			m.files[file] = content + "\n"
			n := 0
			for line := range strings.Lines(content) {
				if n++; strings.HasSuffix(strings.TrimSpace(line), " # <-") {
					m.lines = append(m.lines, fmt.Sprintf("%s:%d", file, n))
				}
			}
		}
		list = append(list, m)
	}
	return list
}

// checked runs sluice check in a directory, and returns its output.
func checked(t *testing.T, dir string, args ...string) (string, error) {
	t.Helper()
	t.Chdir(dir)
	out, _, err := runCommand("", append([]string{"check"}, args...)...)
	return out, err
}

// TestCheck makes typical mistakes. Each is named, with the lines that are marked in the
// file, and with the text of the golden file.
func TestCheck(t *testing.T) {
	golden := must.Get(filepath.Abs("testdata/mistakes.golden"))(t)
	var all strings.Builder
	mistakes := readMistakes(t)
	for _, m := range mistakes {
		fmt.Fprintf(&all, "== %s\n", m.name)
		t.Run(m.name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range m.files {
				must.OK(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
			}
			out, err := checked(t, dir, ".")
			all.WriteString(out)
			if right := m.name == "right"; right != (err == nil) || !right && !errors.Is(err, errReported) {
				t.Errorf("it ended with %v\n%s", err, out)
			}
			var named []string
			for line := range strings.Lines(out) {
				if where, _, ok := strings.Cut(line, ": "); ok && strings.Contains(where, ":") {
					named = append(named, where)
				}
			}
			slices.Sort(named)
			slices.Sort(m.lines)
			if named = slices.Compact(named); !slices.Equal(named, m.lines) {
				t.Errorf("it names %q, want %q\n%s", named, m.lines, out)
			}
		})
	}
	if len(mistakes) < 41 {
		t.Errorf("%d mistakes", len(mistakes)-1)
	}
	compareGolden(t, golden, all.String())
}

// TestCheckOutput has the forms of the output and the exit statuses.
func TestCheckOutput(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		must.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	check.Errorf(t, must.Err(checked(t, dir, dir)), "there are no manifests", "an empty directory")
	if _, err := checked(t, dir, "none.yaml"); err == nil || errors.Is(err, errReported) {
		t.Errorf("a file that does not exist: %v", err)
	}
	write("web.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}]}\n")
	if out, err := checked(t, dir, "web.yaml"); !errors.Is(err, errReported) || !strings.Contains(out, "files 1, Services 1, errors 0, warnings 1") {
		t.Errorf("a warning: %v\n%s", err, out)
	}
	if _, err := checked(t, dir, "--fail-on=error", "web.yaml"); err != nil {
		t.Errorf("a warning is taken for an error: %v", err)
	}
	write("api.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: api}\nspec: {ports: [{port: 0}]}\n")
	out, err := checked(t, dir, "--fail-on=error", "-o", "json", "web.yaml", "api.yaml")
	if !errors.Is(err, errReported) {
		t.Error(err)
	}
	var report struct {
		Files, Services, Errors, Warnings int
		Findings                          []manifests.Finding
	}
	must.OK(t, json.Unmarshal([]byte(out), &report))
	if report.Files != 2 || report.Services != 1 || report.Errors != 1 || report.Warnings != 1 || len(report.Findings) != 2 {
		t.Errorf("%+v", report)
	}
	if f := report.Findings[0]; f.File != "api.yaml" || f.Line != 4 || f.Severity != manifests.Error || f.Object != "Service default/api" || !strings.Contains(f.Text, "0 is not in 1..65535") {
		t.Errorf("%+v", f)
	}
}
