package handover

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// askFor is the variable by which a test starts this program as a process that asks for a
// take-over.
const askFor = "SLUICE_TEST_ASK_FOR"

func TestMain(m *testing.M) {
	if proxy := os.Getenv(askFor); proxy != "" {
		c, err := Dial(proxy)
		if err == nil {
			_, err = c.Receive(Patience)
		}
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// ask has another process ask for a take-over, and returns what it says.
func ask(t *testing.T, proxy string, attributes *syscall.SysProcAttr) string {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), askFor+"="+proxy)
	cmd.SysProcAttr = attributes
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return string(out)
}
