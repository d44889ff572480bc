// Package e2e runs the real binary in network namespaces: a client host, a node
// with the proxy, and backend hosts.
//
// The binary is built once, with the race detector if the tests have it, or for
// SLUICE_TEST_RACE=1 (`make test`): the tests' clients and servers then take no CPU time
// for it. SLUICE_BIN names another binary (`make mutate`). By default the tests run with a
// fraction of the promised load; SLUICE_TEST_FULL=1 (`make test-full`) runs all of
// it.
package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/race"
	"github.com/sluice-proxy/sluice/test/usrsctp"
)

func TestMain(m *testing.M) {
	status := netns.Main(m)
	usrsctp.Clean()
	if program.dir != "" {
		_ = os.RemoveAll(program.dir)
	}
	os.Exit(status)
}

// instrumented says whether the binary under test has the race detector, which makes it slower.
var instrumented = race.Enabled || os.Getenv("SLUICE_TEST_RACE") == "1"

// program is the binary under test. The first test that needs it builds it.
var program struct {
	once sync.Once
	dir  string
	path string
	err  error
}

// built returns the path of the binary under test.
func built(t *testing.T) string {
	t.Helper()
	program.once.Do(func() { program.err = build() })
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.path
}

func build() error {
	if path := os.Getenv("SLUICE_BIN"); path != "" {
		program.path = path
		return nil
	}
	dir, err := os.MkdirTemp("", "sluice-e2e-")
	if err != nil {
		return err
	}
	program.dir, program.path = dir, filepath.Join(dir, "sluice")
	args := []string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", program.path} // links in a third of the time
	cgo := "CGO_ENABLED=0"
	if instrumented {
		args, cgo = append(args, "-race"), "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", append(args, "github.com/sluice-proxy/sluice/cmd/sluice")...)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// full tells whether the tests run at the promised size.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }

// onPaths plays a test over both data paths at the same time.
func onPaths(t *testing.T, play func(t *testing.T, path string)) {
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			play(t, path)
		})
	}
}

// errNotYet is a condition's result while the test has to keep waiting.
var errNotYet = errors.New("not yet")
