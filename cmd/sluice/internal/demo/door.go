package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// The door is the socket through which `sluice demo --exec` reaches a running demo.
// It is in a directory that only its owner can enter: the client sends its
// environment and its terminal, and the server runs commands.

const doorName = "exec.sock"

// doorDirs returns the possible directories of the door, best first.
func doorDirs(runtimeDir, tempDir string, uid int) []string {
	var dirs []string
	if filepath.IsAbs(runtimeDir) {
		dirs = append(dirs, filepath.Join(runtimeDir, "sluice-demo"))
	}
	return append(dirs, filepath.Join(tempDir, fmt.Sprintf("sluice-demo-%d", uid)))
}

func ownDoorDirs() []string {
	return doorDirs(os.Getenv("XDG_RUNTIME_DIR"), os.TempDir(), os.Geteuid())
}

// private returns an error unless the directory is the user's own and closed to
// others.
func private(dir string, uid int) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	case !ok || int(st.Uid) != uid:
		return fmt.Errorf("%s belongs to somebody else", dir)
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s is open to others (mode %04o, want 0700)", dir, info.Mode().Perm())
	}
	return nil
}

// errBusy says that a demo of the same user is running.
var errBusy = errors.New("a demo of yours is running already: use it, or end it first")

// openDoor listens for `sluice demo --exec`. A socket that a killed demo left
// is replaced.
func openDoor(dirs []string, uid int) (*net.UnixListener, error) {
	var all error
	for _, dir := range dirs {
		l, err := openDoorIn(dir, uid)
		if err == nil || errors.Is(err, errBusy) {
			return l, err
		}
		all = errors.Join(all, err)
	}
	return nil, fmt.Errorf("a socket for sluice demo --exec: %w", all)
}

func openDoorIn(dir string, uid int) (*net.UnixListener, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if err := private(dir, uid); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, doorName)
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, errBusy
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// closeDoor removes the socket, and its directory if nothing else is in it.
func closeDoor(l *net.UnixListener) {
	path := l.Addr().String()
	_ = l.Close()
	_ = os.Remove(path) // a listener made from a descriptor does not do it
	_ = os.Remove(filepath.Dir(path))
}

// errNobody says that no demo is running.
var errNobody = errors.New("no demo of yours is running: start `sluice demo` in another terminal (if it runs with sudo, this command needs sudo too)")

// knock connects to the running demo.
func knock(dirs []string, uid int) (*net.UnixConn, error) {
	for _, dir := range dirs {
		if err := private(dir, uid); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return nil, err
		}
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, doorName), Net: "unix"})
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
			continue // left by a demo that was killed
		}
		return nil, err
	}
	return nil, errNobody
}
