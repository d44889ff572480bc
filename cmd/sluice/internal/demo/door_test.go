package demo

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// testDoor is a door for a test alone.
func testDoor(t *testing.T) *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: "@" + t.TempDir()}
}

func TestDoor(t *testing.T) {
	uid, at := os.Geteuid(), testDoor(t)
	if _, err := knock(at, uid); !errors.Is(err, errNobody) {
		t.Fatalf("knock with nobody there: %v", err)
	}
	for range 2 { // nothing is left of the first
		l := must.Get(openDoor(at, uid))(t)
		c := must.Get(knock(at, uid))(t)
		c.Close()
		check.ErrorIsf(t, must.Err(openDoor(at, uid)), errBusy, "a second door")
		l.Close()
		check.ErrorIsf(t, must.Err(knock(at, uid)), errNobody, "knock at a closed door")
	}
}

// Somebody else's socket gets nothing, and is told apart from a demo of ours.
func TestDoorOfSomebodyElse(t *testing.T) {
	uid, at := os.Geteuid(), testDoor(t)
	l := must.Get(openDoor(at, uid))(t)
	defer l.Close()
	const want = "somebody else"
	check.Errorf(t, must.Err(openDoor(at, uid+1)), want, "open")
	check.Errorf(t, must.Err(knock(at, uid+1)), want, "knock")
}

// Another user cannot run commands in the demo.
func TestVisitorIsSomebodyElse(t *testing.T) {
	h := openHotel(t)
	type result struct {
		c   *net.UnixConn
		err error
	}
	dialed := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		const nobody = 65534
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), nobody, ^uintptr(0)); errno != 0 {
			dialed <- result{err: errno}
			return
		}
		c, err := net.DialUnix("unix", nil, h.door)
		dialed <- result{c, err}
	}()
	r := <-dialed
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.c.Close()
	must.OK(t, r.c.SetDeadline(time.Now().Add(20*time.Second)))
	answer, err := io.ReadAll(r.c)
	if err != nil || !strings.Contains(string(answer), "somebody else") {
		t.Errorf("answer %q, %v; want that the visitor is somebody else", answer, err)
	}
}
