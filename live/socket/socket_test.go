package socket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// answering says whether its client may act.
func answering(w http.ResponseWriter, r *http.Request) {
	_, _ = io.WriteString(w, strconv.FormatBool(MayAct(r.Context())))
}

func start(t *testing.T, name string) *Server {
	t.Helper()
	s, err := Listen(name, http.HandlerFunc(answering))
	must.OK(t, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		check.OK(t, <-done)
	})
	return s
}

func get(name string) (string, error) {
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", name)
		},
	}}
	resp, err := client.Get("http://sluice/")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func TestOwnerMayAct(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "admin.sock"), "@sluice-test-" + strconv.Itoa(os.Getpid())} {
		start(t, name)
		if got, err := get(name); got != "true" || err != nil {
			t.Errorf("%s: the owner is told %q: %v", name, got, err)
		}
	}
}

// askFor is the environment variable by which the test program, as another user, asks
// a socket, or says which one is usual. It may be set by TestOthers alone.
const askFor = "SLUICE_TEST_ASK_SOCKET"

func TestMain(m *testing.M) {
	if name := os.Getenv(askFor); name == "?" {
		_, _ = os.Stdout.WriteString(File(""))
		return
	} else if name != "" {
		got, err := get(name)
		if err != nil {
			got = err.Error()
		}
		_, _ = os.Stdout.WriteString(got)
		return
	}
	os.Exit(m.Run())
}

// asOther asks a socket as another user.
func asOther(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "ask")
	own, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(program, own, 0o755)
	}
	for dir := filepath.Dir(program); err == nil && dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		err = os.Chmod(dir, 0o755)
	}
	must.OK(t, err)
	cmd := exec.Command(program)
	cmd.Env = []string{askFor + "=" + name}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// Another user cannot connect to the file, nor act if its mode lets him read, and
// gets nothing from an abstract socket.
func TestOthers(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("SLUICE_REQUIRE_ROOT") != "" {
			t.Fatal("this must run as root")
		}
		t.Skip("SKIP-NEEDS: root, to become another user")
	}
	if got := asOther(t, "?"); inode("/proc/net/dev") == inode("/proc/1/net/dev") && got != "/run/sluice/admin.sock" {
		t.Errorf("the usual socket of the machine is %s for another user", got)
	}
	path := filepath.Join(t.TempDir(), "admin.sock")
	start(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if got := asOther(t, path); got == "true" || got == "false" {
		t.Errorf("another user is answered %q", got)
	}
	must.OK(t, os.Chmod(path, 0o666))
	if got := asOther(t, path); got != "false" {
		t.Errorf("another user who may read is told %q, want that he may not act", got)
	}
	abstract := "@sluice-test-others-" + strconv.Itoa(os.Getpid())
	start(t, abstract)
	if got := asOther(t, abstract); got == "true" || got == "false" {
		t.Errorf("another user is answered %q by an abstract socket", got)
	}
}

// A file that a killed process left is replaced, one that answers is not, and one
// that is no socket is not touched.
func TestFileInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must.OK(t, err)
	left.SetUnlinkOnClose(false)
	if _, err := Listen(path, http.NotFoundHandler()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a socket that another process has: %v", err)
	}
	_ = left.Close()
	s := start(t, path)
	if got, err := get(path); got != "true" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	s.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
	must.OK(t, os.WriteFile(path, []byte("x"), 0o600))
	if _, err := Listen(path, http.NotFoundHandler()); err == nil {
		t.Error("a file that is no socket was replaced")
	}
}

// TestCloseAgainKeepsTheNextSocket: the file of a process that took over stays, even with the
// inode number that this one's had.
func TestCloseAgainKeepsTheNextSocket(t *testing.T) {
	name := filepath.Join(t.TempDir(), "admin")
	s := start(t, name)
	must.OK(t, os.Link(name, name+".next"))
	s.Close()
	if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Close: %v, want no file", err)
	}
	must.OK(t, os.Rename(name+".next", name))
	s.Close()
	check.OKf(t, must.Err(os.Lstat(name)), "after another Close")
}

// A name that the kernel would refuse without a reason, or choose itself, is refused
// with one.
func TestNames(t *testing.T) {
	dir := t.TempDir()
	longest := func(prefix string, n int) string { return prefix + strings.Repeat("x", n-len(prefix)) }
	for name, want := range map[string]string{
		"": "needed", "@": "needed", longest(dir+"/", maxPath+1): "at most 99", longest("@", maxAbstract+1): "at most 108",
		longest(dir+"/", maxPath): "", longest("@sluice-test-"+strconv.Itoa(os.Getpid())+"-", maxAbstract): "",
	} {
		s, err := Listen(name, http.NotFoundHandler())
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", name, err, want)
		}
		if s != nil {
			s.Close()
		}
	}
}

// Proxies of other namespaces that end remove the folder when it is empty, also while this
// one begins.
func TestFolderThatOthersRemove(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, which may make " + Directory)
	}
	stop := make(chan struct{})
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_ = os.Remove(Directory)
				}
			}
		})
	}
	for range 500 {
		s, why, err := ListenDefault(fmt.Sprintf("test-%d", os.Getpid()), http.NotFoundHandler())
		if why != nil || err != nil {
			t.Errorf("%v, %v", why, err)
		}
		if err == nil {
			s.Close()
		}
	}
	close(stop)
	running.Wait()
}
