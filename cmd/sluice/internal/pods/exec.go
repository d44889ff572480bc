package pods

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// Command is what runs in the pod: it copies between its standard input and output and the
// admin socket.
const Command = "dial-stdio"

// Dial connects to the admin socket in a pod. It returns at once: an error, such as a
// missing right, is one of the first read.
func (c *Cluster) Dial(p Pod) (net.Conn, error) {
	target := c.core.Post().Namespace(c.place.Namespace).Resource("pods").Name(p.Name).SubResource("exec").
		Param("container", p.container).Param("command", "sluice").Param("command", Command).
		Param("stdin", "true").Param("stdout", "true").Param("stderr", "true").URL()
	// As kubectl: by a WebSocket, and by SPDY where a server or a proxy before it knows none.
	sockets, err := remotecommand.NewWebSocketExecutor(c.config, "GET", target.String())
	if err != nil {
		return nil, err
	}
	spdy, err := remotecommand.NewSPDYExecutor(c.config, "POST", target)
	if err != nil {
		return nil, err
	}
	executor, err := remotecommand.NewFallbackExecutor(sockets, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return nil, err
	}
	stdin, in := io.Pipe()
	out, stdout := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background()) // ends with Close
	go func() {
		stderr := &limited{}
		err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Stderr: stderr})
		if said := strings.TrimPrefix(strings.TrimSpace(stderr.text.String()), "sluice: "); said != "" {
			err = errors.New(said)
		}
		if err == nil {
			err = io.EOF
		} else {
			err = &ExecError{err}
		}
		_ = stdout.CloseWithError(err) // neither fails
		_ = stdin.CloseWithError(err)
	}()
	return &conn{PipeReader: out, in: in, cancel: cancel}, nil
}

// conn is a connection by an exec. It has no deadlines.
type conn struct {
	*io.PipeReader
	in     *io.PipeWriter
	cancel context.CancelFunc
}

func (c *conn) Write(b []byte) (int, error) { return c.in.Write(b) }

func (c *conn) Close() error {
	c.cancel()
	_ = c.in.Close() // neither fails
	return c.PipeReader.Close()
}

func (c *conn) LocalAddr() net.Addr              { return address{} }
func (c *conn) RemoteAddr() net.Addr             { return address{} }
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// address is what a conn has in place of an address.
type address struct{}

func (address) Network() string { return "exec" }
func (address) String() string  { return "exec" }

// ExecError says why the command in a pod did not run or has ended: the API server's words,
// or those of the command.
type ExecError struct{ err error }

func (e *ExecError) Error() string { return e.err.Error() }
func (e *ExecError) Unwrap() error { return e.err }

// limited keeps the begin of what is written.
type limited struct{ text bytes.Buffer }

func (l *limited) Write(b []byte) (int, error) {
	l.text.Write(b[:min(len(b), max(4096-l.text.Len(), 0))]) // it never fails
	return len(b), nil
}
