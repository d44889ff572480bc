package demo

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// The door is the socket through which `sluice demo --exec` reaches a running demo. It
// has an abstract name, so that nothing is left of it when the demo is killed. Any
// process can take such a name, and connect to it: so each side asks the kernel for the
// other's user, before the visitor sends its environment and its terminal, and before
// the demo runs commands.
func doorOf(uid int) *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: "@" + filepath.Join(os.TempDir(), fmt.Sprintf("sluice-demo-%d", uid))}
}

var (
	// errBusy says that a demo of the same user is running.
	errBusy = errors.New("a demo of yours is running already: use it, or end it first")
	// errNobody says that no demo is running.
	errNobody = errors.New("no demo of yours is running: start `sluice demo` in another terminal (if it runs with sudo, this command needs sudo too)")
)

// openDoor listens for `sluice demo --exec` of a user.
func openDoor(at *net.UnixAddr, uid int) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", at)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return l, err
	}
	c, err := knock(at, uid)
	if err != nil {
		return nil, err
	}
	_ = c.Close()
	return nil, errBusy
}

// knock connects to the running demo of a user.
func knock(at *net.UnixAddr, uid int) (*net.UnixConn, error) {
	c, err := net.DialUnix("unix", nil, at)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, errNobody
	}
	if err != nil {
		return nil, err
	}
	if err := checkPeer(c, uid); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("the socket %s: %w", at, err)
	}
	return c, nil
}

// checkPeer returns an error unless the process at the other end is the user's.
func checkPeer(c *net.UnixConn, uid int) error {
	peer, err := sys.PeerCredentials(c)
	if err == nil && int(peer.Uid) != uid {
		err = fmt.Errorf("it belongs to somebody else (user %d)", peer.Uid)
	}
	return err
}
