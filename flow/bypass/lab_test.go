package bypass

import (
	"os"
	"strings"
	"testing"
	"time"
)

// patience bounds every wait of the tests.
const patience = 20 * time.Second

func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, to look at another network namespace")
	}
}

// isOurs is what tests take for a filter of Sluice.
func isOurs(name string) bool { return strings.HasPrefix(name, "sluice") }
