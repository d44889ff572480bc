// Package e2e runs the real binary in network namespaces: a client host, a
// node with the proxy, and backend hosts.
//
// The binary is built once, with the race detector if the tests have it;
// SLUICE_BIN names one to run in its place (`make mutate`). The tests run with a fraction of the load that the promises are made for;
// SLUICE_TEST_FULL=1 (`make test-full`) asks for all of it.
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
)

func TestMain(m *testing.M) {
	status := netns.Main(m)
	if program.dir != "" {
		_ = os.RemoveAll(program.dir)
	}
	os.Exit(status)
}

// program is the binary under test, built by the first test that asks for it.
var program struct {
	once sync.Once
	dir  string
	path string
	err  error
}

// built gives the path of the binary under test.
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
	args := []string{"build", "-buildvcs=false", "-o", program.path}
	if race.Enabled {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "github.com/sluice-proxy/sluice/cmd/sluice")...)
	if !race.Enabled {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// full tells whether the tests run at the size that the promises are made for.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }

// errNotYet is what a condition gives while it only has to be waited for.
var errNotYet = errors.New("not yet")
