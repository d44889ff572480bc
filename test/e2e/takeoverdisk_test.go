package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestTakeOverWithAFullDisk: the disk of the access log is full while a process takes over. Connections go
// on, lost lines are counted and told, and no line is joined to a part of another one. Sluice log has
// all records.
func TestTakeOverWithAFullDisk(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	disk := t.TempDir()
	must.OK(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	p.accessLog = filepath.Join(disk, "access.log")
	p.start()
	address, opened := addresses(80, vip4)[0], 0
	ask := func(n int) {
		t.Helper()
		for range n {
			check.OK(t, must.Err(lab.Client.Ask("tcp", address)))
			opened++
		}
	}
	held := hold(t, lab.Client, address, 3)
	opened += len(held)
	counted := func(lostToo bool) func(map[string]float64) bool {
		return func(m map[string]float64) bool {
			written, lost := m["sluice_access_log_lines_total"], m["sluice_access_log_lines_lost_total"]
			return int(written+lost) == opened-len(held) && (lost > 0) == lostToo
		}
	}
	ask(1)
	p.awaitMetrics("the first record is written", counted(false))
	filler := filepath.Join(disk, "filler")
	_ = os.WriteFile(filler, make([]byte, 1<<20), 0o600) // until the disk is full
	ask(20)                                              // the last page of the log has room for some
	p.awaitMetrics("the others are lost", counted(true))
	p.awaitLog("access log cannot be written")
	next := *p
	next.start("--take-over")
	p.waitExit()
	alive(t, held)
	ask(20)
	next.awaitMetrics("more are lost", counted(true))
	next.awaitLog("access log cannot be written")
	must.OK(t, os.Remove(filler))
	lines := len(next.records())
	ask(5)
	next.awaitLog("access log can be written again")
	for _, c := range held {
		_ = c.Close()
	}
	held = nil
	next.awaitMetrics("all are counted", counted(true))
	wait.Until(t, "the last ones are written", startTimeout, func() bool { return len(next.records()) == lines+8 })
	wait.Until(t, "sluice log has all of them", startTimeout, func() bool {
		out, err := sluice(t, lab, "log", "-o", "json")
		return err == nil && strings.Count(out, `"end":"client_fin"`) == opened
	})
	next.stop()
}
