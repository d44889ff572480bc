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
	root string
	dir  string // temporary
	// program and tests are the product without a mutation and the end-to-end
	// tests, built when they are first needed.
	program, tests string
	endToEnd       sync.Once
	endToEndError  error

	mu       sync.Mutex
	controls map[string]*control // by test; guarded by mu
}

// control is a run of a test without a mutation.
type control struct {
	once    sync.Once
	verdict verdict
}

func newRunner(root, dir string) *runner {
	return &runner{
		root: root, dir: dir,
		program: filepath.Join(dir, "sluice"), tests: filepath.Join(dir, "e2e.test"),
		controls: make(map[string]*control),
	}
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

// build compiles what a mutation is tested with, so that one that does not compile
// is not taken for one that a test has caught. It gives the product's binary if the
// test is an end-to-end test.
func (r *runner) build(ctx context.Context, m *mutation, overlay, dir string) (program string, err error) {
	if m.pkg != endToEnd {
		return "", r.compile(ctx, "build", "-overlay", overlay, "-o", os.DevNull, "./"+m.place())
	}
	r.endToEnd.Do(func() {
		r.endToEndError = r.compile(ctx, "build", "-buildvcs=false", "-o", r.program, "./cmd/sluice")
		if r.endToEndError == nil {
			r.endToEndError = r.compile(ctx, "test", "-c", "-vet=off", "-o", r.tests, "./"+endToEnd)
		}
	})
	if r.endToEndError != nil {
		return "", r.endToEndError
	}
	program = filepath.Join(dir, "sluice")
	return program, r.compile(ctx, "build", "-overlay", overlay, "-buildvcs=false", "-o", program, "./cmd/sluice")
}

func (r *runner) compile(ctx context.Context, args ...string) error {
	if out, err := r.command(ctx, r.root, nil, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// control runs a mutation's test without the mutation, once for each test.
func (r *runner) control(ctx context.Context, m *mutation) verdict {
	key := m.pkg + " " + m.test
	r.mu.Lock()
	c := r.controls[key]
	if c == nil {
		c = new(control)
		r.controls[key] = c
	}
	r.mu.Unlock()
	c.once.Do(func() { c.verdict = r.test(ctx, m, "", r.program) })
	return c.verdict
}

// test runs a mutation's test: an end-to-end test on a binary of the product, another
// one with an overlay, or without if that is "".
func (r *runner) test(ctx context.Context, m *mutation, overlay, program string) verdict {
	dir := filepath.Join(r.root, m.pkg)
	var cmd *exec.Cmd
	if m.pkg == endToEnd {
		cmd = r.command(ctx, dir, []string{"SLUICE_BIN=" + program},
			"tool", "test2json", r.tests, "-test.v=test2json", "-test.timeout", testTimeout.String(), "-test.run", pattern(m.test))
	} else {
		// Tests that build the product do it with the mistake, too.
		flags := "GOFLAGS=" + os.Getenv("GOFLAGS") + " -overlay=" + overlay
		cmd = r.command(ctx, dir, []string{flags}, "test", "-json", "-count=1", "-vet=off", "-timeout", testTimeout.String(), "-run", pattern(m.test))
	}
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return verdict{broken, ctx.Err().Error()}
	}
	return judge(out, err, m.testName(), func(file string, line int) bool { return isLog(filepath.Join(dir, file), line) })
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
