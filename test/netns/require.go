package netns

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	// requireEnv set to 1 turns skips into failures: where the tests are known to
	// have what they need, a skip would hide a loss.
	requireEnv = "SLUICE_REQUIRE_ROOT"
	// insideEnv marks the process that Main started in a user namespace.
	insideEnv = "SLUICE_TEST_USERNS"
)

// Require skips the test if the process may not create network namespaces, with a
// message that begins with "SKIP-NEEDS: ". With SLUICE_REQUIRE_ROOT=1 it fails
// instead.
func Require(t testing.TB) {
	t.Helper()
	err := capable()
	switch {
	case err == nil:
	case os.Getenv(requireEnv) == "1":
		t.Fatalf("%v (%s=1 asks for it)", err, requireEnv)
	default:
		t.Skipf("SKIP-NEEDS: network namespaces: %v", err)
	}
}

// Main runs a package's tests and returns the exit status for TestMain. If the
// process lacks the capabilities for network namespaces, it runs itself again as
// root of a new user namespace. If that is not allowed either, the tests run
// without and skip.
func Main(m *testing.M) int {
	if capable() == nil || os.Getenv(insideEnv) == "1" {
		return m.Run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return m.Run()
	}
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode()
}

// capable returns an error that names the missing capability.
func capable() error {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return err
	}
	var caps uint64
	for line := range strings.Lines(string(status)) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			if caps, err = strconv.ParseUint(strings.TrimSpace(hex), 16, 64); err != nil {
				return fmt.Errorf("CapEff in /proc/thread-self/status: %w", err)
			}
		}
	}
	for bit, name := range map[int]string{unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN", unix.CAP_NET_ADMIN: "CAP_NET_ADMIN"} {
		if caps&(1<<bit) == 0 {
			return fmt.Errorf("%s is missing", name)
		}
	}
	return nil
}
