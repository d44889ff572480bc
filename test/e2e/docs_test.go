package e2e

import (
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestConfigurationIsDocumented compares the flags that `sluice run --help` lists, and
// their defaults, with the table of docs/configuration.md, whose rows begin with the
// flags' help.
func TestConfigurationIsDocumented(t *testing.T) {
	help, err := exec.Command(built(t), "run", "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, help)
	}
	flags, texts := map[string]string{}, map[string]string{}
	line := regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9-]+)(?: \S+)* {3,}(.*?)(?: \(default.*)?$`)
	byDefault := regexp.MustCompile(`\(default:? "?([^")]*)"?\)$`)
	for _, m := range line.FindAllStringSubmatch(string(help), -1) {
		flags[m[1]], texts[m[1]] = "", m[2]
		if d := byDefault.FindStringSubmatch(m[0]); d != nil {
			flags[m[1]] = d[1]
		}
	}
	delete(flags, "help")

	text := must.Read(t, "../../docs/configuration.md")
	documented, meanings := map[string]string{}, map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `--([a-z0-9-]+)` \\| ([^|]*) \\| (.*) \\|$")
	links := regexp.MustCompile("\\[([^]]*)\\]\\([^)]*\\)|`")
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = strings.Trim(strings.TrimSpace(m[2]), "`")
		meanings[m[1]] = links.ReplaceAllString(m[3], "$1")
	}
	if len(flags) == 0 || len(documented) == 0 {
		t.Fatalf("found %d flags and %d rows", len(flags), len(documented))
	}
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		got, ok := documented[name]
		switch {
		case !ok:
			t.Errorf("--%s (default %q) has no row", name, flags[name])
		case got != flags[name]:
			t.Errorf("--%s: the default is %q, the row says %q", name, flags[name], got)
		case len(texts[name]) < 8 || !strings.HasPrefix(strings.ToLower(meanings[name]), strings.ToLower(texts[name])):
			t.Errorf("--%s: the help is %q, the row says %q", name, texts[name], meanings[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(documented)) {
		if _, ok := flags[name]; !ok {
			t.Errorf("--%s has a row, and there is no such flag", name)
		}
	}
}

// TestPromisesNameTheirTests expects each test to exist that the README and the
// pages on architecture, operations and steering name.
func TestPromisesNameTheirTests(t *testing.T) {
	existing := map[string]bool{}
	for name := range testSources(t) {
		_, test, _ := strings.Cut(name, ".")
		existing[test] = true
	}
	named := regexp.MustCompile(`\bTest[A-Z]\w+`)
	for _, file := range []string{"../../README.md", "../../docs/architecture.md", "../../docs/operations.md", "../../docs/steering.md", "../../docs/swap.md"} {
		text := must.Read(t, file)
		for _, name := range named.FindAllString(string(text), -1) {
			if !existing[name] {
				t.Errorf("%s names %s, which does not exist", file, name)
			}
		}
		for i := '1'; i <= '8'; i++ {
			if promise := "TestPromise" + string(i) + "_"; file == "../../README.md" && i != '2' && i != '7' && !strings.Contains(string(text), promise) {
				t.Errorf("%s names no test of promise %c", file, i)
			}
		}
	}
}

// TestContributingNamesFiles checks that each path that CONTRIBUTING.md names exists.
func TestContributingNamesFiles(t *testing.T) {
	text := must.Read(t, "../../CONTRIBUTING.md")
	paths := regexp.MustCompile("`([a-z0-9_./]+/[a-z0-9_.]*)`").FindAllStringSubmatch(string(text), -1)
	for _, path := range paths {
		check.OKf(t, must.Err(os.Stat(filepath.Join("../..", path[1]))), "CONTRIBUTING.md names %s", path[1])
	}
	if len(paths) < 20 {
		t.Errorf("CONTRIBUTING.md names %d paths", len(paths))
	}
}

// TestDocumentationLinksResolve expects each relative link of a page to lead to a
// file, and its fragment to a heading of that page.
func TestDocumentationLinksResolve(t *testing.T) {
	const root = "../.."
	links := 0
	link := regexp.MustCompile(`\]\(([^()\s:#]*)(?:#([^()\s]*))?\)`)
	err := filepath.WalkDir(root, func(page string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && page != root && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case filepath.Ext(page) != ".md":
			return nil
		}
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			links++
			target := page
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(page), m[1])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", page, m[0], err)
			} else if m[2] != "" && !slices.Contains(headings(t, target), m[2]) {
				t.Errorf("%s links to %s, which has no such heading", page, m[0])
			}
		}
		return nil
	})
	if err != nil || links < 20 {
		t.Fatalf("%d links: %v", links, err)
	}
}

// headings returns the anchors of a page's headings, as GitHub makes them.
func headings(t *testing.T, page string) []string {
	t.Helper()
	text := must.Read(t, page)
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		name := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(m[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}
