package demo

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// getEnv makes the test binary an HTTP client for one URL.
const getEnv = "SLUICE_DEMO_TEST_GET"

func TestMain(m *testing.M) {
	if url := os.Getenv(getEnv); url != "" {
		os.Exit(get(url))
	}
	status := netns.Main(m)
	if program.dir != "" {
		os.RemoveAll(program.dir)
	}
	os.Exit(status)
}

func get(url string) int {
	client := http.Client{Timeout: 10 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return 1
	}
	return 0
}

// program is the real binary, built by the first test that asks for it, where
// everybody can run it.
var program struct {
	once sync.Once
	dir  string
	path string
	err  error
}

func built(t *testing.T) string {
	t.Helper()
	program.once.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "sluice-demo-test-"); program.err != nil {
			return
		}
		program.path = filepath.Join(program.dir, "sluice")
		cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o", program.path, "github.com/sluice-proxy/sluice/cmd/sluice")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			program.err = fmt.Errorf("go build: %w\n%s", err, out)
			return
		}
		program.err = os.Chmod(program.dir, 0o755)
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.path
}

// patience bounds every wait of the tests; the demo's own bounds are shorter.
const patience = 90 * time.Second

// nobody is the user of the rootless tests.
const nobody = 65534

// player is a demo under test. Its temporary files are in a directory of its
// own, which has to be empty in the end.
type player struct {
	t        *testing.T
	tmp      string
	rootless bool
	cmd      *exec.Cmd
	stdout   *screen
	stderr   *screen
	exited   chan struct{}
}

// playDemo starts the demo.
func playDemo(t *testing.T, asNobody bool, args ...string) *player {
	t.Helper()
	netns.Require(t)
	if asNobody && (os.Getuid() != 0 || rootless()) {
		t.Skip("SKIP-NEEDS: root, to become another user; without it the other tests are rootless")
	}
	tmp := must.Get(os.MkdirTemp("", "sdt"))(t)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	p := &player{t: t, tmp: tmp, rootless: asNobody, stdout: newScreen(), stderr: newScreen(), exited: make(chan struct{})}
	if asNobody {
		must.OK(t, os.Chown(tmp, nobody, nobody))
	}
	p.cmd = p.command(args...)
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	must.OK(t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("stdout:\n%s\nstderr:\n%s", p.stdout.text(), p.stderr.text())
		}
	})
	return p
}

func (p *player) command(args ...string) *exec.Cmd {
	cmd := exec.Command(built(p.t), append([]string{"demo"}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+p.tmp)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.rootless {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	return cmd
}

func (p *player) signal(s syscall.Signal) {
	p.t.Helper()
	must.OK(p.t, p.cmd.Process.Signal(s))
}

// wait wants the exit status, and nothing left.
func (p *player) wait(status int) {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatal("the demo does not end")
	}
	check.Equalf(p.t, p.cmd.ProcessState.ExitCode(), status, "exit status")
	p.nothingLeft()
}

// nothingLeft waits until the demo's directory is empty.
func (p *player) nothingLeft() {
	p.t.Helper()
	wait.For(p.t, "nothing is left", patience, func() error {
		list, err := os.ReadDir(p.tmp)
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("left behind: %v", list)
		}
		return err
	})
}

// screen collects what the demo writes, for many to wait on.
type screen struct {
	mu   sync.Mutex
	b    bytes.Buffer  // guarded by mu
	news chan struct{} // guarded by mu; closed and replaced
}

func newScreen() *screen { return &screen{news: make(chan struct{})} }

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.news)
	s.news = make(chan struct{})
	return s.b.Write(p)
}

func (s *screen) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// await waits for a text and returns what comes after it, so far.
func (p *player) await(text string) {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		p.stdout.mu.Lock()
		seen, news := strings.Contains(p.stdout.b.String(), text), p.stdout.news
		p.stdout.mu.Unlock()
		if seen {
			return
		}
		select {
		case <-news:
		case <-p.exited:
			p.t.Fatalf("the demo ended before it said %q", text)
		case <-deadline:
			p.t.Fatalf("the demo does not say %q", text)
		}
	}
}

var lastLine = regexp.MustCompile(`^demo: (\d+) connections, (\d+) answered, (\d+) retried, (\d+) failed$`)

func TestDemoOnce(t *testing.T) {
	for _, rootless := range []bool{false, true} {
		t.Run(fmt.Sprintf("rootless=%v", rootless), func(t *testing.T) {
			p := playDemo(t, rootless, "--once")
			p.wait(0)
			out := p.stdout.text()
			lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
			m := lastLine.FindStringSubmatch(lines[len(lines)-1])
			if m == nil {
				t.Fatalf("last line: %q", lines[len(lines)-1])
			}
			var n [4]int
			for i := range n {
				n[i], _ = strconv.Atoi(m[i+1])
			}
			if n[0] != n[1] || n[2] == 0 || n[3] != 0 {
				t.Errorf("%s: want all answered, some retried, none failed", m[0])
			}
			if got := strings.Count(out, "✓"); got != 6 || strings.Contains(out, "✗") {
				t.Errorf("%d check marks, want 6 and no cross", got)
			}
			if strings.Contains(out, "\x1b") {
				t.Error("colour in a pipe")
			}
			check.Equalf(t, p.stderr.text(), "", "standard error")
		})
	}
}

func TestDemoExec(t *testing.T) {
	for _, rootless := range []bool{false, true} {
		t.Run(fmt.Sprintf("rootless=%v", rootless), func(t *testing.T) {
			p := playDemo(t, rootless)
			p.await("Ctrl-C ends everything.")
			before := len(p.stdout.text())
			self := must.Get(os.Executable())(t)
			if rootless {
				self = copyFor(t, self)
			}
			for _, c := range []struct {
				from, url, want string
			}{
				{"client", "http://10.96.0.20/", "ash|birch|cedar"},
				{"client", "http://[fd00:10:96::30]/", "ash|elm"},
				{"node", "http://10.96.0.10/", "ash|cedar|elm"},
				{"client", "http://10.96.0.10:81/", "connection refused"},
			} {
				cmd := p.command("--exec", "--from", c.from, self)
				cmd.Env = append(cmd.Env, getEnv+"="+c.url)
				out, err := cmd.Output()
				refused := c.want == "connection refused"
				if (err != nil) != refused || !regexp.MustCompile(c.want).Match(out) {
					t.Errorf("%s from %s: %q, %v; want %q", c.url, c.from, out, err, c.want)
				}
			}
			cmd := p.command("--exec", "sh", "-c", "cat; exit 42")
			cmd.Stdin = strings.NewReader("hello")
			out, err := cmd.Output()
			if code := cmd.ProcessState.ExitCode(); code != 42 || string(out) != "hello" {
				t.Errorf("sh: status %d, %q, %v; want 42, hello", code, out, err)
			}
			records := func() error {
				log := p.stdout.text()[before:]
				if got := strings.Count(log, "client_fin") + strings.Count(log, "client_reset"); got != 3 {
					return fmt.Errorf("%d records, want 3:\n%s", got, log)
				}
				return nil
			}
			// The end of the demo would end a connection whose end the proxy has yet to see.
			wait.For(t, "each connection has a record", patience, records)
			p.signal(syscall.SIGTERM)
			p.wait(0)
			check.OK(t, records())

			cmd = p.command("--exec", "true")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "no demo of yours is running") {
				t.Errorf("--exec after the end: %q, %v", out, err)
			}
		})
	}
}

// copyFor copies the test binary to where everybody can run it.
func copyFor(t *testing.T, path string) string {
	t.Helper()
	data := must.Read(t, path)
	copied := filepath.Join(program.dir, "client")
	must.OK(t, os.WriteFile(copied, data, 0o755))
	return copied
}

func TestDemoInterrupted(t *testing.T) {
	p := playDemo(t, false)
	p.await("Sluice demo")
	p.signal(syscall.SIGINT)
	// It may just have finished the story.
	<-p.exited
	p.wait(p.cmd.ProcessState.ExitCode())
	if out := p.stdout.text(); !strings.Contains(out, "interrupted") && !strings.Contains(out, "nothing is left") {
		t.Error("it does not say that it was interrupted")
	}
}

func TestDemoSecond(t *testing.T) {
	p := playDemo(t, false)
	p.await("Ctrl-C ends everything.")
	out, err := p.command().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "running already") {
		t.Errorf("a second demo: %q, %v", out, err)
	}
	p.signal(syscall.SIGINT)
	p.wait(0)
}

// A proxy that dies is told of, with what it said.
func TestDemoProxyDies(t *testing.T) {
	p := playDemo(t, false)
	p.await("Ctrl-C ends everything.")
	proxy := childOf(t, childOf(t, p.cmd.Process.Pid))
	must.OK(t, syscall.Kill(proxy, syscall.SIGKILL))
	p.wait(1)
	check.Containsf(t, p.stderr.text(), "the proxy: it ended: signal: killed", "standard error")
	if s := p.stdout.text(); !strings.Contains(s, "what the proxy said") || !strings.Contains(s, `"ready"`) {
		t.Error("the proxy's log is not shown")
	}
}

// A demo that is killed takes all its processes with it, and its files.
func TestDemoKilled(t *testing.T) {
	p := playDemo(t, false)
	p.await("Ctrl-C ends everything.")
	inside := childOf(t, p.cmd.Process.Pid)
	proxy := childOf(t, inside)
	p.signal(syscall.SIGKILL)
	<-p.exited
	p.nothingLeft()
	for _, pid := range []int{inside, proxy} {
		wait.True(t, fmt.Sprintf("process %d ends", pid), func() bool { return !running(t, pid) })
	}
}

// childOf returns the process's child; it must have exactly one.
func childOf(t *testing.T, pid int) int {
	t.Helper()
	lists := must.Get(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)))(t)
	var children []string
	for _, l := range lists {
		b, err := os.ReadFile(l)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		children = append(children, strings.Fields(string(b))...)
	}
	must.Equalf(t, len(children), 1, "process %d has the children %v", pid, children)
	return must.Get(strconv.Atoi(children[0]))(t)
}

// running reports whether the process is there and not only waiting for its
// parent to take note of its end.
func running(t *testing.T, pid int) bool {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// The demo leaves a network that is in use alone.
func TestDemoInsideWrongNamespace(t *testing.T) {
	netns.Require(t)
	dir := t.TempDir()
	keep := filepath.Join(dir, "keep")
	must.OK(t, os.WriteFile(keep, nil, 0o600))
	lab := netns.NewLab(t, 1)
	out, err := lab.Node.Command(t, built(t), "demo", "--once", "--inside", dir).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "is in use") {
		t.Errorf("%q, %v", out, err)
	}
	check.OKf(t, must.Err(os.Stat(keep)), "a file that is not the demo's")
}
