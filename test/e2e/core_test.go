package e2e

import (
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestFatalSignalLeavesNoCore ends the program by signals that make other programs
// dump core. A core file would hold relayed bytes; its size is not limited here.
func TestFatalSignalLeavesNoCore(t *testing.T) {
	t.Parallel()
	for _, s := range []syscall.Signal{syscall.SIGABRT, syscall.SIGSEGV, syscall.SIGQUIT, syscall.SIGBUS, syscall.SIGTRAP, syscall.SIGSYS} {
		dir := t.TempDir()
		cmd := exec.Command("sh", "-c", `ulimit -c unlimited; exec "$0" "$@"`, built(t), "explain", "--manifests", dir, "-f", "-")
		cmd.Dir, cmd.Env = dir, []string{"PATH=" + os.Getenv("PATH")}
		in := must.Get(cmd.StdinPipe())(t)
		out := must.Get(cmd.StdoutPipe())(t)
		must.OK(t, cmd.Start())
		// Its first answer shows that the program runs.
		_, _ = io.WriteString(in, "{}\n")
		must.OKf(t, must.Err(out.Read(make([]byte, 1))), "no answer")
		must.OK(t, cmd.Process.Signal(s))
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.CoreDump() || status.ExitStatus() != 2 && !status.Signaled() {
			t.Errorf("%v: %v", s, cmd.ProcessState)
		}
		in.Close()
	}
}
