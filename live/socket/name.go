package socket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Auto means the usual socket where the name of one is expected.
const Auto = "auto"

// Directory is where socket files are.
const Directory = "/run/sluice"

// File returns the path of the socket file of a proxy in this network namespace. In
// that of the machine it is admin.sock; in others it carries the namespace's number,
// as they may share the file system. instance tells proxies of one namespace apart;
// it is empty for the usual one.
func File(instance string) string {
	name := "admin"
	if !ofMachine() {
		name = fmt.Sprintf("admin-%d", Namespace())
	}
	if instance != "" {
		name += "-" + instance
	}
	return filepath.Join(Directory, name+".sock")
}

// Abstract returns the abstract name that is used where no file can be made. It
// belongs to the network namespace.
func Abstract(instance string) string {
	if instance != "" {
		instance = "/" + instance
	}
	return "@sluice-admin" + instance
}

// Namespace returns the number of this process's network namespace, or 0.
func Namespace() uint64 { return inode("/proc/self/ns/net") }

// ofMachine reports whether this process is in the machine's network namespace. Each namespace has
// files of its own below /proc/PID/net; /proc/1/ns/net is for those alone that have all of the
// first process's capabilities.
func ofMachine() bool { return inode("/proc/self/net/dev") == inode("/proc/1/net/dev") }

func inode(path string) uint64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}

// ListenDefault listens at the file of an instance, or at its abstract name if the
// file cannot be made. why is the reason then.
func ListenDefault(instance string, h http.Handler) (s *Server, why, err error) {
	for began := time.Now(); time.Since(began) < time.Second; {
		made := os.Mkdir(Directory, 0o755) // Listen says why it has failed
		s, why = Listen(File(instance), h)
		if !errors.Is(why, fs.ErrNotExist) || made != nil && !errors.Is(made, fs.ErrExist) {
			break
		} // else a proxy of another namespace removed the empty folder between the two calls
	}
	if why == nil {
		return s, nil, nil
	}
	s, err = Listen(Abstract(instance), h)
	return s, why, err
}

// Cleanup removes the socket file that a killed proxy has left. It returns the path
// if there was one.
func Cleanup(instance string) (removed string, err error) {
	path := File(instance)
	if info, _ := os.Lstat(path); info == nil || info.Mode().Type() != os.ModeSocket {
		return "", nil // there is none
	}
	if c, err := net.Dial("unix", path); err == nil {
		return "", c.Close() // a proxy answers
	}
	if err := os.Remove(path); err != nil {
		return "", err
	}
	_ = os.Remove(Directory) // if it is empty
	return path, nil
}
