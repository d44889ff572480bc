package main

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

const root = "../.."

// TestEachMutationApplies also wants the tests to exist, so that the list cannot
// fall behind the tree.
func TestEachMutationApplies(t *testing.T) {
	names := map[string]bool{}
	for i := range mutations {
		m := &mutations[i]
		if names[m.name] {
			t.Errorf("%s: two mutations have this name", m.name)
		}
		names[m.name] = true
		if m.old == m.new {
			t.Errorf("%s changes nothing", m.name)
		}
		if _, err := m.mutated(root); err != nil {
			t.Error(err)
		}
		if !hasTest(t, m.pkg, m.testName()) {
			t.Errorf("%s: %s has no %s", m.name, m.pkg, m.testName())
		}
	}
}

// TestEachPromiseHasAMutation wants a mutation for each end-to-end test that the
// README names.
func TestEachPromiseHasAMutation(t *testing.T) {
	readme := must.Read(t, filepath.Join(root, "README.md"))
	covered := map[string]bool{}
	for i := range mutations {
		covered[mutations[i].testName()] = true
	}
	promised := regexp.MustCompile("`(TestPromise[0-9]_[A-Za-z]+)`").FindAllStringSubmatch(string(readme), -1)
	if len(promised) < 10 {
		t.Fatalf("the README names %d tests of promises", len(promised))
	}
	for _, name := range promised {
		if !covered[name[1]] {
			t.Errorf("no mutation shows that %s can fail", name[1])
		}
	}
}

// hasTest tells whether a package has a test of exactly this name.
func hasTest(t *testing.T, pkg, name string) bool {
	t.Helper()
	files := must.Get(filepath.Glob(filepath.Join(root, pkg, "*_test.go")))(t)
	for _, path := range files {
		text := must.Read(t, path)
		if strings.Contains(string(text), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}
