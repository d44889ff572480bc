package redirect

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) {
	if os.Getenv(squatting) != "" {
		os.Exit(squat())
	}
	os.Exit(netns.Main(m))
}

func TestOneProxyInANetworkNamespace(t *testing.T) {
	a, b := netns.New(t, "a"), netns.New(t, "b")
	lock := func(n *netns.Namespace, name string) (l *Lock, err error) {
		_ = n.Do(func() error {
			l, err = AcquireLock(name)
			return nil
		})
		return l, err
	}
	first := must.Get(lock(a, "sluice"))(t)
	var locked *LockedError
	if _, err := lock(a, "sluice"); !errors.As(err, &locked) || locked.PID != os.Getpid() {
		t.Errorf("second one: got %v, want an error that names process %d", err, os.Getpid())
	}
	for _, c := range []struct {
		ns   *netns.Namespace
		name string
	}{{b, "sluice"}, {a, "other"}} {
		l, err := lock(c.ns, c.name)
		if err != nil {
			t.Errorf("%s in %s: %v", c.name, c.ns.Name(), err)
			continue
		}
		defer l.Release()
	}
	must.OK(t, first.Release())
	again, err := lock(a, "sluice")
	must.OKf(t, err, "after the release")
	_ = again.Release()
}

// A process that may not steer keeps nobody out, however many names it takes, and
// the proxies that come then still exclude each other.
func TestSquatterDoesNotHoldTheLock(t *testing.T) {
	node := netns.New(t, "node")
	// The program is this one, as somebody without any capability.
	squat := exec.Command("/proc/self/exe")
	squat.Env = append(os.Environ(), squatting+"=1")
	squat.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, Pdeathsig: syscall.SIGKILL}
	ready := must.Get(squat.StdoutPipe())(t)
	if err := node.Do(squat.Start); err != nil {
		if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIP-NEEDS: more than one user: %v", err) // one's own user namespace has one
	}
	defer func() {
		_ = squat.Process.Kill()
		_ = squat.Wait()
	}()
	must.Equalf(t, must.Get(bufio.NewReader(ready).ReadString('\n'))(t), "ready\n", "the squatter says")
	if err := node.Do(func() error {
		lock, err := AcquireLock("sluice")
		if err != nil {
			return err
		}
		defer lock.Release()
		if !slices.Contains(lock.Squatters, Holder{PID: squat.Process.Pid, UID: 65534}) {
			t.Errorf("squatters: %v, want process %d of uid 65534", lock.Squatters, squat.Process.Pid)
		}
		var locked *LockedError
		if _, err := AcquireLock("sluice"); !errors.As(err, &locked) || locked.PID != os.Getpid() || !strings.Contains(err.Error(), fmt.Sprintf("process %d of uid %d ", os.Getpid(), os.Geteuid())) {
			t.Errorf("second one: got %v, want an error that names process %d", err, os.Getpid())
		}
		_ = squat.Process.Kill()
		_ = squat.Wait()
		if _, err := AcquireLock("sluice"); !errors.As(err, &locked) {
			t.Errorf("second one after the squatter: got %v, want an error", err)
		}
		return nil
	}); err != nil {
		t.Errorf("beside a squatter: %v", err)
	}
}

const squatting = "SLUICE_TEST_SQUAT"

// squat takes names of the lock until it is killed: the very name, one that begins
// with it, and one where nobody listens.
func squat() int {
	for _, name := range []string{"@sluice/sluice", "@sluice/sluice/2"} {
		if _, err := net.Listen("unix", name); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	if _, err := net.ListenPacket("unixgram", "@sluice/sluice/3"); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {}
}
