// Package socket listens on the admin socket: HTTP over a unix socket. It decides
// who may connect and who may do more than read.
//
// A socket file has mode 0600, so that only its owner and root reach it; who changes
// that lets others read. An abstract socket, which has no mode, is for its owner and
// root alone. Actions are for these in any case: the kernel tells who connects
// (SO_PEERCRED).
package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// maxConnections bounds the connections of clients. A new one takes the place of
	// another one that is idle, or that has been served longest.
	maxConnections = 64
	// answerTime bounds an answer that sets no time of its own.
	answerTime = time.Minute
	// mode is the mode of the socket file.
	mode = 0o600
)

// Server serves the admin socket.
type Server struct {
	name        string
	listener    net.Listener
	server      *httpport.Server
	connections httpport.Group
	file        os.FileInfo // of the socket, or nil
	closing     sync.Once
}

// owner is the key of a request's context: whether its client may act.
type owner struct{}

// MayAct reports whether the client of a request is the socket's owner or root.
func MayAct(ctx context.Context) bool {
	is, _ := ctx.Value(owner{}).(bool)
	return is
}

// Listen listens at a path, or at an abstract name that begins with @. It takes the
// place of a file that nobody listens at. The server answers while Serve runs.
func Listen(name string, h http.Handler) (*Server, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	s := &Server{name: name}
	var err error
	if strings.HasPrefix(name, "@") {
		s.listener, err = net.Listen("unix", name)
	} else {
		s.listener, s.file, err = listenFile(name)
	}
	if err != nil {
		return nil, fmt.Errorf("admin socket %s: %w", name, cause(err))
	}
	s.connections.Max = maxConnections
	s.server = httpport.New(&s.connections, h, answerTime)
	s.server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if wrapped, ok := c.(interface{ NetConn() net.Conn }); ok {
			c = wrapped.NetConn()
		}
		return context.WithValue(ctx, owner{}, isOwner(c))
	}
	return s, nil
}

// Bounds of names, by the 108 bytes of a socket's address. A path ends with a zero byte,
// and listenFile adds .PID to it.
const (
	maxAbstract = 108
	maxPath     = 107 - len(".4194304")
)

// checkName returns what is wrong with a name. The kernel would take @ for a name that
// it chooses itself, and says only that an argument is invalid if one is too long.
func checkName(name string) error {
	most := maxPath
	if strings.HasPrefix(name, "@") {
		most = maxAbstract
	}
	switch {
	case name == "" || name == "@":
		return fmt.Errorf("admin socket %q: a path or @NAME is needed", name)
	case len(name) > most:
		return fmt.Errorf("admin socket %s: the name has %d bytes, and at most %d are possible", name, len(name), most)
	}
	return nil
}

// cause returns the error of the system call alone: the path is named already.
func cause(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// listenFile makes a socket file. Nobody but the owner can connect at any moment: the
// file gets its name when it has its mode.
func listenFile(path string) (net.Listener, os.FileInfo, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close() // it has answered
		return nil, nil, syscall.EADDRINUSE
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != os.ModeSocket {
		return nil, nil, fmt.Errorf("the file is not a socket")
	}
	next := fmt.Sprintf("%s.%d", path, os.Getpid())
	_ = os.Remove(next) // of a process that had our number
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: next, Net: "unix"})
	if err != nil {
		return nil, nil, err
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(next, mode)
	if err == nil {
		err = os.Rename(next, path)
	}
	var info os.FileInfo
	if err == nil {
		info, err = os.Lstat(path)
	}
	if err != nil {
		_, _ = l.Close(), os.Remove(next) // the first error is the one to tell
		return nil, nil, err
	}
	return l, info, nil
}

// isOwner reports whether the peer of a connection is our user or root.
func isOwner(c net.Conn) bool {
	conn, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	peer, err := sys.PeerCredentials(conn)
	return err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
}

// Name returns the path or the abstract name.
func (s *Server) Name() string { return s.name }

// Evicted returns how many connections were closed in favour of new ones; 0 for nil.
func (s *Server) Evicted() uint64 {
	if s == nil {
		return 0
	}
	return s.connections.Evicted()
}

// Serve serves requests until ctx ends. It returns an error if the socket fails.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.Close)
	err := s.server.Serve(ownersOnly{s.listener, s.file == nil})
	if stop() && !errors.Is(err, http.ErrServerClosed) { // ctx has not ended, so the server failed
		s.Close()
		return fmt.Errorf("admin socket %s: %w", s.name, err)
	}
	return nil
}

// Close ends all requests, and removes the file unless another one is there. Further calls do
// nothing: the next process's file may have the number that this one's had.
func (s *Server) Close() { s.closing.Do(s.close) }

func (s *Server) close() {
	_ = s.server.Close()
	_ = s.listener.Close()
	if s.file == nil {
		return
	}
	if now, err := os.Lstat(s.name); err == nil && os.SameFile(now, s.file) {
		_ = os.Remove(s.name)
		if filepath.Dir(s.name) == Directory {
			_ = os.Remove(Directory) // if it is empty
		}
	}
}

// ownersOnly closes connections of others if the socket has no mode.
type ownersOnly struct {
	net.Listener
	check bool
}

// Accept implements net.Listener.
func (l ownersOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || !l.check || isOwner(c) {
			return c, err
		}
		_ = c.Close()
	}
}
