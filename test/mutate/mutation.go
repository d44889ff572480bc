package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mutation is one mistake in the product, and the test that has to notice it.
type mutation struct {
	name string // short, for -run and the output
	what string // what a user would see
	file string // path in the module
	old  string // occurs exactly once in the file
	new  string
	pkg  string // of the test, as a path in the module
	test string // a regular expression for go test -run; begins with the test's whole name
}

// testName is the test's name without its subtests.
func (m *mutation) testName() string {
	name, _, _ := strings.Cut(m.test, "/")
	return name
}

// judgesTime tells whether the test compares times, so that nothing may run beside it.
func (m *mutation) judgesTime() bool { return strings.HasPrefix(m.test, "TestPromise8_") }

// mutated gives the file's text with the mistake in it.
func (m *mutation) mutated(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return nil, fmt.Errorf("mutation %s: %w", m.name, err)
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return nil, fmt.Errorf("mutation %s: %s contains its old text %d times, want once", m.name, m.file, n)
	}
	return []byte(strings.Replace(string(text), m.old, m.new, 1)), nil
}
