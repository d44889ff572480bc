package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// event gives a line of go test -json.
func event(action, test, output string) string {
	return `{"Action":"` + action + `","Test":"` + test + `","Output":"` + output + `"}`
}

func TestJudge(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, row := range []struct {
		name  string
		lines []string
		err   error
		want  outcome
		line  string
	}{
		{"pass", []string{event("run", "TestA", ""), event("output", "TestA", `    a_test.go:1: noted\n`), event("pass", "TestA", "")}, nil, passed, ""},
		{
			"assertion after a log line",
			[]string{event("output", "TestA", `    a_test.go:1: noted\n`), event("output", "TestA", `    a_test.go:2: got 1, want 2\n`), event("fail", "TestA", "")},
			failed, caught, "a_test.go:2: got 1, want 2",
		},
		{
			"assertion of a subtest",
			[]string{event("output", "TestA/b", `        a_test.go:3: no\n`), event("fail", "TestA/b", ""), event("fail", "TestA", "")},
			failed, caught, "a_test.go:3: no",
		},
		{"another test", []string{event("output", "TestB", `    a_test.go:3: no\n`), event("fail", "TestB", "")}, failed, broken, ""},
		{"nothing ran", []string{event("output", "", `testing: warning: no tests to run\n`), event("pass", "", "")}, nil, broken, ""},
		{"skip", []string{event("output", "TestA", `    a_test.go:3: SKIP-NEEDS: x\n`), event("skip", "TestA", "")}, nil, broken, "the test was skipped"},
		{"only log lines", []string{event("output", "TestA", `    a_test.go:1: noted\n`), event("fail", "TestA", "")}, failed, broken, ""},
		{
			"time-out of go test",
			[]string{event("output", "TestA", `    a_test.go:2: x\n`), event("output", "TestA", `panic: test timed out after 2m0s\n`), event("fail", "TestA", "")},
			failed, broken, "panic: test timed out after 2m0s",
		},
		{
			"the product panicked",
			[]string{event("output", "TestA", `    a_test.go:2: sluice panicked\n`), event("output", "TestA", `        panic: nil map\n`), event("fail", "TestA", "")},
			failed, caught, "a_test.go:2: sluice panicked",
		},
		{"does not compile", []string{event("build-output", "", `x.go:1:2: undefined: y\n`), event("build-fail", "", ""), event("fail", "", "")}, failed, broken, ""},
	} {
		got := judge([]byte(strings.Join(row.lines, "\n")), row.err, "TestA", func(_ string, line int) bool { return line == 1 })
		if got.outcome != row.want || row.line != "" && got.line != row.line {
			t.Errorf("%s: got %v, want %v %q", row.name, got, row.want, row.line)
		}
	}
}

func TestIsLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a_test.go")
	must.OK(t, os.WriteFile(path, []byte("t.Logf(\"%d\", 1)\nt.Errorf(\"%d\", 2)\nt.Log()\n"), 0o644))
	for line, want := range map[int]bool{0: false, 1: true, 2: false, 3: true, 9: false} {
		check.Equalf(t, isLog(path, line), want, "line %d", line)
	}
	if isLog(filepath.Join(t.TempDir(), "none.go"), 1) {
		t.Error("a file of another package is taken for a log line")
	}
}

func TestPattern(t *testing.T) {
	check.Equal(t, pattern("TestA/b"), "^TestA$/^b$")
}
