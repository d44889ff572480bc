//go:build programs

package programs

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// postgres runs PostgreSQL on the first backend, with the table of pgbench.
func postgres(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, 1, 5432)
	dir := debian.Directory(t)
	data := filepath.Join(dir, "data")
	h := w.Backends[0]
	out, err := debian.As(h.Command(t, debian.Find(t, "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"), dir).CombinedOutput()
	if err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	const everybody = "host all all 0.0.0.0/0 trust\nhost all all ::/0 trust\n"
	must.OK(t, os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte(everybody), 0o644))
	s := w.serve(h, dir, "postgres", "-D", data, "-p", strconv.Itoa(int(w.port)), "-h", "0.0.0.0,::", "-k", dir,
		"-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=60")
	// It accepts connections, and refuses their users, before it is ready.
	wait.True(t, "the database is ready", func() bool { return strings.Contains(s.log.String(), "ready to accept connections") })
	return w
}

// pg are the options of every PostgreSQL client.
func (w *world) pg(vip string, more ...string) []string {
	return append([]string{"-h", vip, "-p", strconv.Itoa(int(w.port)), "-U", "postgres"}, more...)
}

// TestPgbench runs pgbench: transactions of all kinds, selects, and a new
// connection for each.
func TestPgbench(t *testing.T) {
	w := postgres(t)
	seconds := "1"
	if full() {
		seconds = "10"
	}
	w.client("pgbench", w.pg(vips[0], "-i", "-q", "-s", "1", "postgres")...)
	for _, vip := range vips {
		for _, options := range []string{"-S", "-S -C", "-N", "-S -M prepared"} {
			args := append(strings.Fields(options), "-c", "8", "-j", "2", "-T", seconds, "postgres")
			out := w.client("pgbench", w.pg(vip, args...)...)
			w.want(out, "number of failed transactions: 0 ")
			for line := range strings.Lines(out) {
				if strings.HasPrefix(line, "tps") {
					t.Logf("pgbench %s at %s: %s", options, vip, strings.TrimSpace(line))
				}
			}
		}
	}
}

// TestCopyWithAReaderThatPauses copies a table out while the reader stops for
// longer than a minute. Every row must arrive, in order.
func TestCopyWithAReaderThatPauses(t *testing.T) {
	const rows = 1_000_000 // 64 MB
	w := postgres(t)
	for _, vip := range vips {
		t.Run(vip, func(t *testing.T) {
			t.Parallel()
			query := fmt.Sprintf(`copy (select i, repeat('x', 56) from generate_series(1, %d) i) to stdout`, rows)
			cmd := debian.As(w.Client.Command(t, debian.Find(t, "psql"), w.pg(vip, "-c", query, "postgres")...), "/")
			var complaints output.Text
			cmd.Stderr = &complaints
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			must.OK(t, err)
			lines, n := bufio.NewScanner(out), 0
			for lines.Scan() {
				n++
				if number, _, _ := strings.Cut(lines.Text(), "\t"); number != strconv.Itoa(n) {
					t.Fatalf("row %d is %q", n, lines.Text())
				}
				if n == rows/10 {
					pause(longPause())
				}
			}
			if err := cmd.Wait(); err != nil || n != rows {
				t.Errorf("%d rows of %d, %v: %s", n, rows, err, &complaints)
			}
		})
	}
}
