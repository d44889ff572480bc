package main

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/report"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The CPU time of a process group counts in each measured time, however the output that
// delimits it is split.
func TestHostCPU(t *testing.T) {
	busy := exec.Command("sh", "-c", "while :; do :; done")
	busy.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	must.OK(t, busy.Start())
	defer func() {
		_ = busy.Process.Kill()
		_ = busy.Wait()
	}()
	var h hostCPU
	h.watch(busy.Process.Pid)
	name := window(2, "sluice", "sctp-rr1")
	begin, end := fmt.Sprintf("%s begin %s\n", load.Marker, name), fmt.Sprintf("%s end %s\n", load.Marker, name)
	fmt.Fprint(&h, begin[:9])
	fmt.Fprint(&h, begin[9:])
	wait.For(t, "CPU time", wait.Patience, func() error {
		if used := groupCPU(busy.Process.Pid) - h.began[name]; used < 20*time.Millisecond {
			return fmt.Errorf("%v", used)
		}
		return nil
	})
	fmt.Fprint(&h, end)
	if used := h.windows[name]; used < 20*time.Millisecond || used > time.Minute {
		t.Errorf("%v of CPU time", used)
	}
	h.windows[name] = 400 * time.Millisecond
	h.windows[window(3, "sluice", "sctp-rr1")] = 100 * time.Millisecond
	h.windows[window(8, "sluice", "sctp-rr1")] = time.Second
	var d report.Data
	for _, round := range []int{1, 2, 3, 8} { // round 1 has no measured time
		d.Add(round, "sluice", "sctp-rr1"+countSuffix, 1500)
	}
	h.addTo(&d)
	if got := d.Series("sluice", "sctp-rr1.persecond"); len(got) != 3 || got[0] != 6000 || got[1] == got[1] || got[2] != 1500 {
		t.Errorf("%v", got)
	}
	if groupCPU(os.Getpid()+1<<30) != 0 {
		t.Error("a group without processes has CPU time")
	}
}
