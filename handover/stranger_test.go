package handover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
)

// askFor is the variable by which a test starts this program as a process that asks for a
// take-over, and dropping the one by which it has no CAP_NET_ADMIN then.
const (
	askFor   = "SLUICE_TEST_ASK_FOR"
	dropping = "SLUICE_TEST_DROP"
)

func TestMain(m *testing.M) {
	if os.Getenv(dropping) != "" {
		fmt.Println(drop())
		os.Exit(1)
	}
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

// drop starts this program again without CAP_NET_ADMIN.
func drop() error {
	runtime.LockOSThread() // capabilities belong to a thread
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_NET_ADMIN, 0, 0, 0); err != nil {
		return err
	}
	_ = os.Unsetenv(dropping)
	return syscall.Exec("/proc/self/exe", os.Args, os.Environ())
}

// asker is a process that asks for a take-over.
type asker struct {
	name       string
	attributes syscall.SysProcAttr
	drop       bool   // CAP_NET_ADMIN
	says       string // part of what it says
}

// ask has a process ask, and returns what it says.
func (a *asker) ask(t *testing.T, proxy string) string {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), askFor+"="+proxy)
	if a.drop {
		cmd.Env = append(cmd.Env, dropping+"=1")
	}
	cmd.SysProcAttr = &a.attributes
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v: %s", a.name, err, out)
	}
	return string(out)
}

// TestStrangersGetNothing: a process of another user, of another user namespace or without
// CAP_NET_ADMIN is turned away, whether it can be seen or not. One of another network namespace
// finds nobody.
func TestStrangersGetNothing(t *testing.T) {
	needsRoot(t)
	mapped := []syscall.SysProcIDMap{{Size: 1}}
	for _, a := range []asker{
		{name: "another user", attributes: syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}},
		{name: "another user namespace", attributes: syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: mapped, GidMappings: mapped}, says: "may not take part"},
		{name: "another user and PID namespace", attributes: syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID, UidMappings: mapped, GidMappings: mapped}, says: "may not take part"},
		{name: "no CAP_NET_ADMIN", drop: true, says: "may not take part"},
		{name: "no CAP_NET_ADMIN, another PID namespace", attributes: syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}, drop: true, says: "may not take part"},
	} {
		t.Run(a.name, func(t *testing.T) {
			o, err := Listen(t.Name(), func() (r Running) { return r })
			must.OK(t, err)
			defer o.Close()
			said := make(chan string, 1)
			go func() { said <- a.ask(t, t.Name()) }()
			_ = o.listener.SetDeadline(time.Now().Add(time.Minute))
			c, err := o.Accept()
			var stranger *StrangerError
			if !errors.As(err, &stranger) {
				t.Errorf("accepted: %v, want a *StrangerError", err)
			}
			if err == nil {
				_ = c.Close()
			}
			if text := <-said; !strings.Contains(text, a.says) {
				t.Errorf("it says %q, want %q", text, a.says)
			}
		})
	}
	t.Run("another network namespace", func(t *testing.T) {
		o, err := Listen(t.Name(), func() (r Running) { return r })
		must.OK(t, err)
		defer o.Close()
		a := asker{name: t.Name(), attributes: syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}}
		if said := a.ask(t, t.Name()); !strings.Contains(said, ErrNobody.Error()) {
			t.Errorf("it says %q, want that nobody is there", said)
		}
	})
}

// TestUnseenProcessProvesItself: two processes that cannot see each other, as in two pods of a
// node, believe each other by their proofs.
func TestUnseenProcessProvesItself(t *testing.T) {
	needsRoot(t)
	o, err := Listen(t.Name(), func() (r Running) { return r })
	must.OK(t, err)
	defer o.Close()
	said := make(chan string, 1)
	a := asker{name: "next", attributes: syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}}
	go func() { said <- a.ask(t, t.Name()) }()
	_ = o.listener.SetDeadline(time.Now().Add(time.Minute))
	c, err := o.Accept()
	must.OKf(t, err, "accepted")
	_ = c.Close()
	if text := <-said; !strings.Contains(text, "EOF") { // it has believed this process
		t.Errorf("it says %q", text)
	}
}

// TestProofOfAnotherConnection: the descriptor of somebody else's end proves nothing, although
// somebody with the right for it has forced its buffer.
func TestProofOfAnotherConnection(t *testing.T) {
	needsRoot(t)
	l, err := net.ListenUnix(network, address(t.Name()))
	must.OK(t, err)
	defer l.Close()
	dial := func() (*Conn, *Conn) {
		t.Helper()
		near, err := connect(t.Name())
		must.OK(t, err)
		far, err := l.AcceptUnix()
		must.OK(t, err)
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		return &Conn{unix: near}, &Conn{unix: far}
	}
	victim, thief := dial()
	must.OK(t, victim.prove(nil))
	_, stolen, err := thief.receive(Patience)
	if err != nil || len(stolen) != 1 {
		t.Fatalf("%d descriptors, %v", len(stolen), err)
	}
	defer closeAll(stolen)
	if forced, err := sys.HasForcedBuffer(stolen[0]); err != nil || !forced {
		t.Fatalf("the proof's buffer is forced: %v, %v", forced, err)
	}
	if !thief.isPeer(stolen[0]) {
		t.Error("the proof is not of its own connection")
	}
	_, running := dial()
	if running.isPeer(stolen[0]) {
		t.Error("it is taken for the end of another connection")
	}
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root")
	}
}
