//go:build programs

package programs

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// systemd is Debian's systemd as the first process of namespaces of its own, on a lab's node. It has the unit
// of deploy/.
type systemd struct {
	*world
	dir string // has bin, etc and log, which are /usr/local/bin, /etc/default and /var/log for it
	pid string // its own
}

// boot starts systemd with the directory $1, in a cgroup of its own, until standard input ends.
const boot = `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
own=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/sluice-systemd-$$
mkdir "$own"
sh -ec 'echo $$ >"$1"/cgroup.procs; exec unshare --pid --fork --kill-child --mount --cgroup --ipc --uts sh -ec "$2" sh "$3"' sh "$own" '
read -r pid rest </proc/self/stat
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount --bind "$1/bin" /usr/local/bin
mount --bind "$1/etc" /etc/default
mount --bind "$1/log" /var/log
echo "$pid" >"$1/pid"
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH=/etc/default/units /lib/systemd/systemd --system --log-target=console --show-status=no' "$1" &
read -r _ || :
kill -9 $! || :
wait || :
while ! find "$own" -depth -type d -exec rmdir {} +; do sleep 0.1; done 2>/dev/null`

// bootSystemd starts systemd, and waits until it takes commands.
func bootSystemd(t *testing.T) *systemd {
	t.Helper()
	t.Parallel()
	dir := t.TempDir()
	s := &systemd{dir: dir, world: &world{t: t, Lab: netns.NewLab(t, 2), port: 8080}}
	for _, name := range []string{"bin", "log", "etc/manifests", "etc/units/sluice.service.d"} {
		must.OK(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	s.write("etc/manifests/service.yaml", s.yaml())
	s.install()
	s.copy("../../deploy/systemd/sluice.service", "etc/units/sluice.service", 0o644)
	s.write("etc/units/default.target", "[Unit]\nDefaultDependencies=no\n") // an empty file masks
	s.write("etc/units/sysinit.target", "[Unit]\nDefaultDependencies=no\n")
	s.write("etc/units/sluice.service.d/log.conf", "[Service]\nStandardOutput=append:/var/log/sluice.log\nStandardError=append:/var/log/sluice.log\n")
	cmd := s.Node.Command(t, "unshare", "--mount", "sh", "-c", boot, "sh", dir)
	log := &output.Text{}
	cmd.Stdout, cmd.Stderr = log, log
	open := must.Get(cmd.StdinPipe())(t)
	must.OK(t, cmd.Start())
	t.Cleanup(func() {
		_ = open.Close()
		_ = cmd.Wait()
		if t.Failed() {
			said, _ := os.ReadFile(filepath.Join(dir, "log/sluice.log"))
			t.Logf("systemd said:\n%s\nsluice said:\n%s", log, said)
		}
	})
	wait.For(t, "systemd takes commands", time.Minute, func() error {
		pid, err := os.ReadFile(filepath.Join(dir, "pid"))
		if s.pid = strings.TrimSpace(string(pid)); err == nil {
			_, err = s.systemctl("is-active", "default.target")
		}
		return err
	})
	return s
}

// install puts the binary in place of the one that runs, as an update does.
func (s *systemd) install() {
	s.t.Helper()
	s.copy(os.Getenv("SLUICE_BIN"), "bin/new", 0o755)
	must.OK(s.t, os.Rename(filepath.Join(s.dir, "bin/new"), filepath.Join(s.dir, "bin/sluice")))
}

func (s *systemd) copy(from, to string, mode os.FileMode) {
	s.t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(filepath.Join(s.dir, to), text, mode)
	}
	must.OK(s.t, err)
}

func (s *systemd) write(name, text string) {
	s.t.Helper()
	must.OK(s.t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o644))
}

// setFlags adds flags to those of the file of flags in deploy/.
func (s *systemd) setFlags(flags string) {
	s.t.Helper()
	text := must.Read(s.t, "../../deploy/systemd/sluice.default")
	const manifests = "\nSLUICE_ARGS=--manifests=/etc/sluice/manifests "
	if !strings.Contains(string(text), manifests) {
		s.t.Fatalf("sluice.default lacks %s", manifests)
	}
	s.write("etc/sluice", strings.Replace(string(text), manifests, "\nSLUICE_ARGS=--manifests=/etc/default/manifests --hostname-override=node --service-cidr=10.96.0.0/16,fd00:96::/112 "+flags+" ", 1))
}

// systemctl returns its output.
func (s *systemd) systemctl(args ...string) (string, error) {
	out, err := s.Node.Command(s.t, "nsenter", append([]string{"-t", s.pid, "-a", "systemctl"}, args...)...).CombinedOutput()
	text := strings.TrimSpace(string(out))
	if err != nil {
		err = fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return text, err
}

// command is systemctl that must succeed.
func (s *systemd) command(args ...string) string {
	s.t.Helper()
	return must.Get(s.systemctl(args...))(s.t)
}

// show returns a property of the unit.
func (s *systemd) show(property string) string {
	s.t.Helper()
	return s.command("show", "--value", "--property", property, "sluice")
}

// reload has another process take over, and expects it to be the only one of the unit, at last.
func (s *systemd) reload() {
	s.t.Helper()
	before := s.show("MainPID")
	s.command("reload", "sluice")
	main := s.show("MainPID")
	if state := s.show("ActiveState"); main == before || main == "0" || state != "active" {
		s.t.Fatalf("the main process was %s and is %s, the unit is %s", before, main, state)
	}
	wait.For(s.t, "the process before has ended", time.Minute, func() error {
		out, err := s.Node.Command(s.t, "nsenter", "-t", s.pid, "-a", "cat", "/sys/fs/cgroup/system.slice/sluice.service/cgroup.procs").Output()
		if list := strings.Fields(string(out)); err == nil && (len(list) != 1 || list[0] != main) {
			err = fmt.Errorf("processes %v, want %s", list, main)
		}
		return err
	})
}

// answers expects the unit's main process to answer at the file of the admin socket.
func (s *systemd) answers() {
	s.t.Helper()
	check.OK(s.t, s.says(`"pid": `+s.show("MainPID")+","))
}

// says returns an error unless the status at the file of the admin socket has all texts.
func (s *systemd) says(texts ...string) error {
	out, err := s.Node.Command(s.t, "nsenter", "-t", s.pid, "-a", "sluice", "status", "-o", "json", "--admin-socket", "/run/sluice/admin.sock").CombinedOutput()
	for _, text := range texts {
		if !strings.Contains(string(out), text) {
			return fmt.Errorf("no %s: %s (%v)", text, out, err)
		}
	}
	return err
}

// exchange has open connections carry a line each way.
func exchange(t *testing.T, open []net.Conn) {
	t.Helper()
	for _, c := range open {
		_ = c.SetDeadline(time.Now().Add(wait.Patience))
		_, err := io.WriteString(c, "again\n")
		b := make([]byte, len("again\n"))
		if err == nil {
			_, err = io.ReadFull(c, b)
		}
		if err != nil || string(b) != "again\n" {
			t.Fatalf("%s: %q, %v", c.LocalAddr(), b, err)
		}
	}
}

// TestUnitTakesOver: systemctl start returns when the Service is served. At each reload the next process
// takes over, with the binary and the flags of then, and becomes the unit's main process; no connection is
// refused or cut. Where the next one fails, the reload does, and the running one serves on. A reload
// into another steering mode, and a main process that was killed, lead to one that serves.
func TestUnitTakesOver(t *testing.T) {
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			s := bootSystemd(t)
			for _, b := range s.Backends {
				b.EchoTCP(t, s.port)
			}
			flags := "--datapath=" + path
			s.setFlags(flags)
			s.command("start", "sluice")
			var open []net.Conn
			for i := range 10 {
				c, err := s.dial(vips[i%2])
				if err == nil {
					defer c.Close()
					_, err = netns.AskOn(c)
				}
				must.OK(t, err)
				open = append(open, c)
			}
			began := time.Now()
			clients := newLoad(2, func(i int) error {
				_, err := s.Client.Ask("tcp", s.at(vips[i%2]))
				return err
			})
			defer func() { s.judge(clients.stop(), began) }()

			clients.served(t, 10)
			s.answers()
			s.reload()
			s.answers()
			exchange(t, open)
			s.install()
			s.setFlags(flags + " -v=4")
			s.reload()
			exchange(t, open)
			main := s.show("MainPID")
			if args, err := s.Node.Command(t, "nsenter", "-t", s.pid, "-a", "cat", "/proc/"+main+"/cmdline").Output(); err != nil || !strings.Contains(string(args), "\x00-v=4\x00") {
				t.Errorf("the main process runs as %q, %v", args, err)
			}
			s.setFlags(flags + " --no-such-flag")
			if out, err := s.systemctl("reload", "sluice"); err == nil {
				t.Errorf("a reload with a wrong flag succeeds: %s", out)
			}
			check.Equalf(t, s.show("MainPID"), main, "the main process")
			clients.served(t, 10)
			exchange(t, open)
			if n := s.show("NRestarts"); n != "0" {
				t.Errorf("systemd has restarted the unit %s times", n)
			}
		})
	}
}

// TestUnitServesAgain: a reload into another steering mode, a main process that was killed after it took
// over, and a restart lead to a process that serves. After a stop there is none.
func TestUnitServesAgain(t *testing.T) {
	s := bootSystemd(t)
	for _, b := range s.Backends {
		b.EchoTCP(t, s.port)
	}
	s.setFlags("--redirect=sklookup")
	s.command("start", "sluice")
	serves := func(mode string) {
		t.Helper()
		wait.For(t, "the main process serves", time.Minute, func() error {
			if _, err := s.Client.Ask("tcp", s.at(vips[0])); err != nil {
				return err
			}
			return s.says(`"pid": `+s.show("MainPID")+",", `"mode": "`+mode)
		})
	}
	serves("sklookup")
	s.setFlags("--redirect=tproxy")
	s.reload()
	serves("tproxy")
	s.reload()
	main := s.show("MainPID")
	must.Run(t, s.Node.Command(t, "nsenter", "-t", s.pid, "-a", "sh", "-c", "kill -9 "+main))
	wait.For(t, "systemd starts another process", time.Minute, func() error {
		if n, state, now := s.show("NRestarts"), s.show("ActiveState"), s.show("MainPID"); n != "1" || state != "active" || now == main {
			return fmt.Errorf("%s restarts, %s, main process %s", n, state, now)
		}
		return nil
	})
	serves("tproxy")
	s.command("restart", "sluice")
	serves("tproxy")
	s.command("stop", "sluice")
	if state, result, code := s.show("ActiveState"), s.show("Result"), s.show("ExecMainStatus"); state != "inactive" || result != "success" || code != "0" {
		t.Errorf("after the stop: %s, %s, exit status %s", state, result, code)
	}
}
