package netns

import (
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/test/bpffs"
)

// MountBPF makes a BPF file system for a test, as nodes have one, and gives its path.
func MountBPF(t testing.TB) string {
	t.Helper()
	Require(t)
	path, closer, err := bpffs.Open()
	switch {
	case err == nil:
		t.Cleanup(closer)
	case os.Getenv(requireEnv) == "1":
		t.Fatal(err)
	default: // in a user namespace
		t.Skipf("SKIP-NEEDS: %v", err)
	}
	return path
}
