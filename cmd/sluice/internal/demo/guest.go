package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// sendRequest hands over the files and the request.
func sendRequest(c *net.UnixConn, r *request, files ...*os.File) error {
	if err := sys.SendFiles(c, []byte{greeting}, files...); err != nil {
		return fmt.Errorf("hand over the terminal: %w", err)
	}
	return json.NewEncoder(c).Encode(r)
}

const (
	// requestPatience bounds the time from the connection to the request.
	requestPatience = 5 * time.Second
	// goodbyePatience is what a command gets to end after SIGHUP.
	goodbyePatience = time.Second
)

// guests runs the commands that come in by the door.
type guests struct {
	door  *net.UnixListener
	place func(from string) (*scratch.Namespace, error)
	all   sync.WaitGroup
}

// serve lets commands in until the context ends, and then waits until they have
// ended too.
func (g *guests) serve(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { _ = g.door.Close() })
	defer stop()
	for {
		c, err := g.door.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err != nil {
			continue // the visitor went away before it came in
		}
		g.all.Go(func() { g.serveOne(ctx, c) })
	}
	g.all.Wait()
}

func (g *guests) serveOne(ctx context.Context, c *net.UnixConn) {
	defer c.Close()
	if err := g.run(ctx, c); err != nil {
		_ = json.NewEncoder(c).Encode(reply{Error: err.Error()})
	}
}

// run starts the command, passes signals on, and replies with its status. When
// the visitor or the demo goes, so does the command.
func (g *guests) run(ctx context.Context, c *net.UnixConn) error {
	if err := checkPeer(c, os.Geteuid()); err != nil {
		return fmt.Errorf("the visitor: %w", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(requestPatience))
	var hello [1]byte
	n, files, err := sys.ReceiveFiles(c, hello[:], 3)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil || n == 0 {
		return nil // somebody who only looked whether the demo is there
	}
	if hello[0] != greeting || len(files) != 3 {
		return errors.New("another version of sluice demo is running")
	}
	in := json.NewDecoder(c)
	var r request
	if err := in.Decode(&r); err != nil {
		return fmt.Errorf("request: %w", err)
	}
	_ = c.SetReadDeadline(time.Time{})
	where, err := g.place(r.From)
	if err != nil {
		return err
	}
	cmd := &exec.Cmd{Path: r.Path, Args: r.Args, Env: r.Env, Dir: r.Dir, Stdin: files[0], Stdout: files[1], Stderr: files[2],
		// A session of its own: the visitor's terminal belongs to another one,
		// and the demo's must not get it into its hands.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}}
	if err := where.Do(cmd.Start); err != nil {
		return err
	}
	ended := make(chan struct{})
	left := make(chan struct{})
	go takeSignals(in, cmd.Process.Pid, left)
	go seeOff(ctx, cmd.Process.Pid, left, ended)
	_ = cmd.Wait()
	close(ended)
	status := exitStatus(cmd.ProcessState)
	return json.NewEncoder(c).Encode(reply{Status: &status})
}

// takeSignals passes the visitor's signals to the command's process group until
// the visitor is gone. The group may be gone before.
func takeSignals(in *json.Decoder, pid int, left chan<- struct{}) {
	defer close(left)
	for {
		var m message
		if err := in.Decode(&m); err != nil {
			return
		}
		if s := syscall.Signal(m.Signal); slices.Contains(passedOn(), os.Signal(s)) {
			_ = syscall.Kill(-pid, s)
		}
	}
}

// seeOff ends a command whose visitor, or whose demo, has gone.
func seeOff(ctx context.Context, pid int, left, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	case <-left:
	case <-ctx.Done():
	}
	_ = syscall.Kill(-pid, syscall.SIGHUP)
	select {
	case <-ended:
	case <-time.After(goodbyePatience):
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
}

// exitStatus is the status as a shell gives it.
func exitStatus(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return statusSignal + int(ws.Signal())
	}
	return s.ExitCode()
}
