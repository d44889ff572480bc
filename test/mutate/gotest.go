package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// testTimeout ends a test that hangs. Such an end proves nothing: the test has to
// say by a deadline of its own what did not happen. The longest one is test/e2e's, for a start.
const testTimeout = 7 * time.Minute

// endToEnd is the package whose tests run the product's binary, and mostSaid is how
// much is shown of what a test says.
const (
	endToEnd = "test/e2e"
	mostSaid = 160
)

// runner builds and tests the module, with or without a mutation. Its methods are safe
// for concurrent use.
type runner struct {
	root, dir string // dir is temporary
	// Without a mutation, everything is built or run once, when it is first needed.
	programs memo[built]   // the product, and bpf2go
	tests    memo[built]   // by package
	controls memo[verdict] // by package and test
}

// built is the path of a binary, or why there is none.
type built struct {
	path string
	err  error
}

// memo keeps what a function returned for each key. It is safe for concurrent use.
type memo[V any] struct {
	mu     sync.Mutex
	values map[string]func() V
}

func (m *memo[V]) get(key string, f func() V) V {
	m.mu.Lock()
	once := m.values[key]
	if once == nil {
		if m.values == nil {
			m.values = make(map[string]func() V)
		}
		once = sync.OnceValue(f)
		m.values[key] = once
	}
	m.mu.Unlock()
	return once()
}

// verdict is what a run of a test showed.
type verdict struct {
	outcome outcome
	line    string // what the test, or the tool, said first
}

// outcome is how a run of a test ended.
type outcome uint8

const (
	passed outcome = iota
	caught         // an assertion of the test failed
	broken         // anything else: it proves nothing
)

// overlay writes the mutated file and the overlay that puts it in the place of the
// product's into a directory. It returns the overlay's path, for go build -overlay.
func (r *runner) overlay(ctx context.Context, m *mutation, dir string) (string, error) {
	text, err := m.mutated(r.root)
	if err != nil {
		return "", err
	}
	mutated := filepath.Join(dir, filepath.Base(m.file))
	if err := os.WriteFile(mutated, text, 0o644); err != nil {
		return "", err
	}
	replace := map[string]string{filepath.Join(r.root, m.file): mutated}
	if m.isBPF() {
		if replace, err = r.compileBPF(ctx, m, dir, text); err != nil {
			return "", err
		}
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o644)
}

// build compiles what a mutation is tested with, so that one that does not compile is not taken
// for one that a test has caught. It returns the product's binary if the test is an end-to-end
// test. It leaves it to the tests of the mutation's own package, which do not compile either.
func (r *runner) build(ctx context.Context, m *mutation, overlay, dir string) (program string, err error) {
	switch m.pkg {
	case endToEnd:
		program = filepath.Join(dir, "sluice")
		return program, r.buildProduct(ctx, program, "-overlay", overlay)
	case m.place():
		return "", nil
	}
	return "", r.compile(ctx, m.place(), "build", "-overlay", overlay, "-o", os.DevNull, ".")
}

// buildProduct links without what debuggers read: that takes half the time.
func (r *runner) buildProduct(ctx context.Context, path string, flags ...string) error {
	return r.compile(ctx, "cmd/sluice", slices.Concat([]string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", path}, flags, []string{"."})...)
}

// compile runs a go command in a package's directory, which may be of another module.
func (r *runner) compile(ctx context.Context, pkg string, args ...string) error {
	if out, err := r.command(ctx, filepath.Join(r.root, pkg), nil, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", strings.Join(args, " "), pkg, err, out)
	}
	return nil
}

// testsOf returns the test binary of a package without a mutation.
func (r *runner) testsOf(ctx context.Context, pkg string) (string, error) {
	b := r.tests.get(pkg, func() built {
		path := filepath.Join(r.dir, strings.ReplaceAll(pkg, "/", "_")+".test")
		return built{path, r.compile(ctx, pkg, "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", path, ".")}
	})
	return b.path, b.err
}

// control runs a mutation's test without the mutation, once for each test.
func (r *runner) control(ctx context.Context, m *mutation) verdict {
	return r.controls.get(m.pkg+" "+m.test, func() verdict {
		var product built
		if m.pkg == endToEnd {
			product = r.programs.get("sluice", func() built {
				path := filepath.Join(r.dir, "sluice")
				return built{path, r.buildProduct(ctx, path)}
			})
		}
		if product.err != nil {
			return verdict{broken, product.err.Error()}
		}
		return r.run(ctx, m, "SLUICE_BIN="+product.path)
	})
}

// test runs a mutation's test: an end-to-end test on a binary of the product, another
// one with an overlay.
func (r *runner) test(ctx context.Context, m *mutation, overlay, program string) verdict {
	if m.pkg == endToEnd {
		return r.run(ctx, m, "SLUICE_BIN="+program)
	}
	// Tests that build the product do it with the mistake, too.
	flags := "GOFLAGS=" + os.Getenv("GOFLAGS") + " -overlay=" + overlay
	return r.judge(ctx, m, r.command(ctx, filepath.Join(r.root, m.pkg), []string{flags},
		"test", "-json", "-count=1", "-vet=off", "-timeout", testTimeout.String(), "-run", pattern(m.test)))
}

// run runs a mutation's test by its package's binary without the mutation.
func (r *runner) run(ctx context.Context, m *mutation, env string) verdict {
	tests, err := r.testsOf(ctx, m.pkg)
	if err != nil {
		return verdict{broken, err.Error()}
	}
	return r.judge(ctx, m, r.command(ctx, filepath.Join(r.root, m.pkg), []string{env},
		"tool", "test2json", tests, "-test.v=test2json", "-test.timeout", testTimeout.String(), "-test.run", pattern(m.test)))
}

// judge runs a command whose output is go test -json's.
func (r *runner) judge(ctx context.Context, m *mutation, cmd *exec.Cmd) verdict {
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return verdict{broken, ctx.Err().Error()}
	}
	return judge(out, err, m.testName(), func(file string, line int) bool { return isLog(filepath.Join(cmd.Dir, file), line) })
}

// pattern anchors each part of a test's name.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + p + "$"
	}
	return strings.Join(parts, "/")
}

// command gives a go command in a process group of its own, which is interrupted as
// a whole: the go command alone would leave its test running.
func (r *runner) command(ctx context.Context, dir string, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// failure is the beginning of what a test says: where, and what.
var failure = regexp.MustCompile(`^\s+(\w+\.go):(\d+): (.*)`)

// judge says what go test -json has shown about a test. isLog tells whether a line
// of the test's source writes to the test's log and asserts nothing.
func judge(out []byte, err error, test string, isLog func(file string, line int) bool) verdict {
	v := verdict{outcome: broken}
	ended := ""
	var other []string // what tests did not say
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		text := strings.TrimSpace(e.Output)
		name, _, _ := strings.Cut(e.Test, "/")
		switch {
		case e.Action != "output" && e.Action != "build-output":
			if e.Test == test {
				ended = e.Action
			}
		case strings.HasPrefix(e.Output, "panic:"), strings.HasPrefix(e.Output, "fatal error:"):
			return verdict{broken, text} // the test's; what the product writes is indented
		case name != test:
			if text != "" && text != "FAIL" {
				other = append(other, text)
			}
		case v.line == "":
			if said := failure.FindStringSubmatch(e.Output); said != nil {
				if number, _ := strconv.Atoi(said[2]); !isLog(said[1], number) {
					v.line = shorten(text)
				}
			}
		}
	}
	switch {
	case ended == "pass" && err == nil:
		return verdict{outcome: passed}
	case ended == "fail" && v.line != "":
		v.outcome = caught
	case ended == "skip":
		v.line = "the test was skipped"
	case v.line == "":
		v.line = fmt.Sprintf("no assertion failed (%v): %s", err, shorten(strings.Join(other, " ")))
	}
	return v
}

// shorten cuts a text to what fits a line.
func shorten(s string) string {
	if r := []rune(s); len(r) > mostSaid {
		return string(r[:mostSaid]) + "..."
	}
	return s
}

// isLog tells whether a line of a source file calls Log or Logf. What it says looks
// the same as an error in the output.
func isLog(path string, line int) bool {
	text, err := os.ReadFile(path)
	if err != nil {
		return false // a helper of another package: these do not log
	}
	lines := strings.Split(string(text), "\n")
	return line > 0 && line <= len(lines) && (strings.Contains(lines[line-1], ".Log(") || strings.Contains(lines[line-1], ".Logf("))
}
