package e2e

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
)

// TestAnotherUserIsToldWhatIsMissing in each steering mode: the program ends with an error
// that names the right and says how to get it, once.
func TestAnotherUserIsToldWhatIsMissing(t *testing.T) {
	t.Parallel()
	netns.Require(t)
	node := netns.NewLab(t, 0).Node
	dir := t.TempDir()
	program := dir + "/sluice" // where that user may read
	text, err := os.ReadFile(built(t))
	if err == nil {
		err = os.WriteFile(program, text, 0o755) //nolint:gosec // a program
	}
	for path := dir; err == nil && path != os.TempDir() && path != "/"; path = path[:strings.LastIndexByte(path, '/')] {
		err = os.Chmod(path, 0o755) //nolint:gosec // as above
	}
	must.OK(t, err)
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			cmd := exec.Command(program, append([]string{"run", "--manifests", dir, "--access-log", "off", "--admin-socket", "off"}, m.flags...)...)
			cmd.Env = m.environment(t)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, Pdeathsig: syscall.SIGKILL}
			var out output.Text
			cmd.Stdout, cmd.Stderr = &out, &out
			must.OK(t, node.Do(cmd.Start))
			err := cmd.Wait()
			said := out.String()
			if err == nil || strings.Count(said, "CAP_NET_ADMIN is missing") != 1 || strings.Count(said, "or grant CAP_NET_ADMIN") != 1 || strings.Count(said, "\n") != 1 {
				t.Errorf("%v: %q", err, said)
			}
		})
	}
}
