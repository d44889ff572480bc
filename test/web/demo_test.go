package web

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// patience bounds what takes no certain time.
const patience = time.Minute

// demo is a `sluice demo --web`, whose clients go on asking.
type demo struct {
	program   string
	url       string
	manifests string
	env       []string
}

// program returns the binary that SLUICE_BIN names, or builds one.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("SLUICE_BIN"); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "sluice")
	build := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-o", path, "./cmd/sluice")
	build.Dir = "../.."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return path
}

// said collects what a process writes.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// startDemo runs the demo until the test ends, and waits until its story is over.
func startDemo(t *testing.T) *demo {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("SLUICE_REQUIRE_ROOT") != "" {
			t.Fatal("this must run as root")
		}
		t.Skip("SKIP-NEEDS: root, for network namespaces")
	}
	// A directory of its own also gives this demo a name of its own.
	tmp, err := os.MkdirTemp("", "swt")
	must.OK(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(tmp) })
	d := &demo{program: program(t), env: append(os.Environ(), "TMPDIR="+tmp)}
	out := &said{}
	cmd := exec.Command(d.program, "demo", "--web=127.0.0.1:0")
	cmd.Env, cmd.Stdout, cmd.Stderr = d.env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	must.OK(t, cmd.Start())
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		check.OKf(t, <-exited, "the demo")
		if t.Failed() {
			t.Logf("the demo said:\n%s", out)
		}
	})
	invitation := regexp.MustCompile(`(?s)manifests in (\S+) and see it follow.*go on asking: (http://\S+) shows`)
	wait.For(t, "the demo's story is over", patience, func() error {
		select {
		case err := <-exited:
			exited <- err
			t.Fatalf("the demo ended: %v\n%s", err, out)
		default:
		}
		m := invitation.FindStringSubmatch(out.String())
		if m == nil {
			return fmt.Errorf("it said %q", out)
		}
		d.manifests, d.url = m[1], m[2]
		return nil
	})
	return d
}

// holdFor makes the test program hold a connection to an address, from a client pod.
const holdFor = "SLUICE_WEB_TEST_HOLD"

func TestMain(m *testing.M) {
	to := os.Getenv(holdFor)
	if to == "" {
		os.Exit(m.Run())
	}
	c, err := net.DialTimeout("tcp", to, 10*time.Second)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(c.LocalAddr())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test closes it
}

// held is a connection of a client pod.
type held struct {
	from   string // the client's address and port
	opened time.Time
	end    func()
}

// hold opens a connection from a client pod, until the test or end.
func (d *demo) hold(t *testing.T, to string) *held {
	t.Helper()
	self, err := os.Executable()
	must.OK(t, err)
	cmd := exec.Command(d.program, "demo", "--exec", self)
	cmd.Env = append(d.env, holdFor+"="+to)
	in, err := cmd.StdinPipe()
	must.OK(t, err)
	out, err := cmd.StdoutPipe()
	must.OK(t, err)
	must.OK(t, cmd.Start())
	h := &held{end: sync.OnceFunc(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})}
	t.Cleanup(h.end)
	var line [200]byte
	n, err := out.Read(line[:])
	h.opened = time.Now()
	if h.from = strings.TrimSpace(string(line[:n])); err != nil || !strings.Contains(h.from, ":") {
		t.Fatalf("a client of %s said %q: %v", to, h.from, err)
	}
	return h
}

// put writes a manifest.
func (d *demo) put(t *testing.T, name, text string) {
	t.Helper()
	draft := filepath.Join(d.manifests, "."+name)
	err := os.WriteFile(draft, []byte(text), 0o600)
	if err == nil {
		err = os.Rename(draft, filepath.Join(d.manifests, name))
	}
	must.OK(t, err)
}
