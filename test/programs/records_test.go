//go:build programs

package programs

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// recipe returns a block of a page that contains a text, with other texts put in.
func recipe(t *testing.T, page, contains string, replace ...string) string {
	t.Helper()
	text := must.Read(t, "../../docs/"+page)
	for _, m := range regexp.MustCompile("(?s)\n *```[a-z]*\n(.*?)\n *```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(m[1], contains) {
			for i := 0; i < len(replace); i += 2 {
				if !strings.Contains(m[1], replace[i]) {
					t.Fatalf("the recipe of %s lacks %s:\n%s", page, replace[i], m[1])
				}
			}
			return strings.NewReplacer(replace...).Replace(m[1])
		}
	}
	t.Fatalf("%s has no recipe with %s", page, contains)
	return ""
}

// file writes a file of the test.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must.OK(t, os.WriteFile(path, []byte(text+"\n"), 0o644))
	return path
}

// connect makes one connection, which leaves a record.
func (w *world) connect() {
	w.t.Helper()
	must.OK(w.t, must.Err(w.Client.Ask("tcp", w.at(vips[0]))))
}

// recordsIn counts the records in the lines of a text.
func recordsIn(text string) (n int) {
	for line := range strings.Lines(text) {
		var r struct{ Service, End string }
		if json.Unmarshal([]byte(line), &r) == nil && r.Service == "default/program:main" && r.End != "" {
			n++
		}
	}
	return n
}

// awaitRecords waits until a text has some records.
func awaitRecords(t *testing.T, what string, n int, read func() (string, error)) {
	t.Helper()
	wait.For(t, what, time.Minute, func() error {
		text, err := read()
		if got := recordsIn(text); err != nil || got != n {
			return fmt.Errorf("%d records, want %d: %w\n%s", got, n, err, text)
		}
		return nil
	})
}

func reading(path string) func() (string, error) {
	return func() (string, error) {
		text, err := os.ReadFile(path)
		return string(text), err
	}
}

// logrotate, as docs/connection-log.md has it, moves the file away, and no record is
// lost.
func TestLogrotate(t *testing.T) {
	w := newWorld(t, 1, 8080)
	w.Backends[0].EchoTCP(t, 8080)
	w.connect()
	awaitRecords(t, "the first record", 1, reading(w.accessLog))
	config := file(t, "logrotate.conf", recipe(t, "connection-log.md", "postrotate",
		"/var/log/sluice/access.log", w.accessLog, "pkill -HUP -x sluice", fmt.Sprintf("kill -HUP %d", w.proxy.Cmd.Process.Pid), "daily", "su root root\n    daily"))
	state := filepath.Join(t.TempDir(), "state")
	if out, err := exec.Command(debian.Find(t, "logrotate"), "--force", "--state", state, config).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	awaitRecords(t, "the first record is in the old file", 1, reading(w.accessLog+".1"))
	wait.For(t, "the proxy has a new file", time.Minute, func() error { _, err := os.Stat(w.accessLog); return err })
	w.connect()
	awaitRecords(t, "the second record is in the new file", 1, reading(w.accessLog))
	awaitRecords(t, "the old file stays as it is", 1, reading(w.accessLog+".1"))
}

// rsyslog, as docs/observing.md has it, sends each record to a receiver of lines of
// JSON.
func TestRsyslog(t *testing.T) {
	const records = 20
	w := newWorld(t, 1, 8080)
	w.Backends[0].EchoTCP(t, 8080)
	var receiver net.Listener
	err := w.Node.Do(func() (err error) {
		receiver, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	must.OK(t, err)
	t.Cleanup(func() { _ = receiver.Close() })
	lines := make(chan string, 10*records)
	go netns.Accept(receiver, func(c net.Conn) {
		go func() {
			for in := bufio.NewScanner(c); in.Scan(); {
				lines <- in.Text()
			}
		}()
	})
	_, port, err := net.SplitHostPort(receiver.Addr().String())
	must.OK(t, err)
	dir := t.TempDir()
	config := file(t, "rsyslog.conf", recipe(t, "observing.md", "omfwd",
		"/var/log/sluice/access.log", w.accessLog, "logs.example.com", "127.0.0.1", "5170", port, "/var/spool/rsyslog", dir))
	if out, err := exec.Command(debian.Find(t, "rsyslogd"), "-N1", "-f", config).CombinedOutput(); err != nil {
		t.Fatalf("rsyslog does not take the recipe: %v: %s", err, out)
	}
	cmd := w.Node.Command(t, debian.Find(t, "rsyslogd"), "-n", "-f", config, "-i", filepath.Join(dir, "pid"))
	log := &output.Text{}
	cmd.Stdout, cmd.Stderr = log, log
	must.OK(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Signal(syscall.SIGTERM); _ = cmd.Wait() })
	for range records {
		w.connect()
	}
	var got strings.Builder
	awaitRecords(t, "all records arrive", records, func() (string, error) {
		for {
			select {
			case line := <-lines:
				got.WriteString(line + "\n")
			default:
				return got.String(), nil
			}
		}
	})
}

// journald has each record that the proxy writes to its standard output.
func TestJournald(t *testing.T) {
	const records = 5
	journald := "/lib/systemd/systemd-journald"
	must.OK(t, must.Err(os.Stat(journald)))
	dir := t.TempDir()
	// A journal of its own, in a mount namespace: the machine's is not touched. It ends
	// with the proxy, which takes the shell's place.
	const script = `set -e
journald=$1 journal=$2; shift 2
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/journal /run/log/journal
mount --bind "$journal" /run/log/journal
od -An -N16 -tx1 /dev/urandom | tr -d ' \n' > /run/machine-id
mount --bind /run/machine-id /etc/machine-id
setpriv --pdeathsig KILL "$journald" &
for i in $(seq 200); do [ -S /run/systemd/journal/stdout ] && break; sleep 0.05; done
exec "$@" > >(exec systemd-cat -t sluice)`
	w := newWorldBy(t, []string{"unshare", "-m", "bash", "-c", script, "bash", journald, dir}, 1, 8080, "--access-log", "-")
	w.Backends[0].EchoTCP(t, 8080)
	for range records {
		w.connect()
	}
	awaitRecords(t, "the journal has all records", records, func() (string, error) {
		out, err := exec.Command("journalctl", "-D", dir, "-t", "sluice", "-o", "cat", "--no-pager").CombinedOutput()
		return string(out), err
	})
}
