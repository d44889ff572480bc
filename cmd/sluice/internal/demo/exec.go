package demo

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
)

// The talk at the door: the visitor sends one byte with its standard input,
// output and error, then JSON values: a request, and later signals. The demo
// answers with replies; the last one has the exit status.

// request asks for a command.
type request struct {
	Path string   `json:"path"` // absolute
	Args []string `json:"args"` // with the name
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
	From string   `json:"from"` // FromClient or FromNode
}

// The places in the demo's network that a command can run in.
const (
	FromClient = "client" // where the client pods are
	FromNode   = "node"   // where the proxy is
)

// message is what the visitor sends after the request.
type message struct {
	Signal int `json:"signal"`
}

// reply is what the demo sends.
type reply struct {
	Status *int   `json:"status,omitempty"` // as a shell gives it
	Error  string `json:"error,omitempty"`  // the command was not started
}

// greeting is the byte that carries the files.
const greeting = '1'

// The statuses that shells give for a command that they cannot find, or not
// start, or that a signal ended.
const (
	statusNotStarted = 126
	statusNotFound   = 127
	statusSignal     = 128
)

// Exec runs a command inside the network of the running demo, with this
// process's standard input, output and error, environment and directory, and
// gives its exit status. From is FromClient or FromNode. The error tells why
// there is none, or why it could not be started.
func Exec(from string, command []string) (status int, err error) {
	path, err := exec.LookPath(command[0])
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return statusNotFound, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return statusNotFound, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return statusNotStarted, err
	}
	c, err := knock(doorOf(os.Geteuid()), os.Geteuid())
	if err != nil {
		return statusNotStarted, err
	}
	defer c.Close()
	r := &request{Path: path, Args: command, Env: os.Environ(), Dir: dir, From: from}
	status, err = visitDemo(c, r, os.Stdin, os.Stdout, os.Stderr)
	if err != nil {
		return status, fmt.Errorf("%s: %w", command[0], err)
	}
	return status, nil
}

// visitDemo sends the request and returns the exit status. Signals that end or
// interrupt a program are passed on meanwhile.
func visitDemo(c *net.UnixConn, r *request, stdio ...*os.File) (int, error) {
	if err := sendRequest(c, r, stdio...); err != nil {
		return statusNotStarted, err
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, passedOn()...)
	defer signal.Stop(signals)
	// While this process were stopped the command would go on reading the
	// terminal, together with the shell.
	signal.Ignore(syscall.SIGTSTP)
	ended := make(chan struct{})
	defer close(ended)
	go sendSignals(c, signals, ended)

	var answer reply
	if err := json.NewDecoder(c).Decode(&answer); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
			err = errors.New("the demo has ended")
		}
		return statusNotStarted, err
	}
	if answer.Status == nil {
		return statusNotStarted, errors.New(answer.Error)
	}
	return *answer.Status, nil
}

// passedOn are the signals that reach a command through the door.
func passedOn() []os.Signal {
	return []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH}
}

func sendSignals(c net.Conn, signals <-chan os.Signal, ended <-chan struct{}) {
	out := json.NewEncoder(c)
	for {
		select {
		case s := <-signals:
			if number, ok := s.(syscall.Signal); ok && out.Encode(message{Signal: int(number)}) != nil {
				return // the demo has ended; so will the wait for its reply
			}
		case <-ended:
			return
		}
	}
}
