package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// self is the program that runs, also when its file was replaced meanwhile.
const self = "/proc/self/exe"

const (
	readyPatience = 10 * time.Second
	stopPatience  = 5 * time.Second
)

// proxy is the real proxy, a child process in the namespace that this process
// runs in.
type proxy struct {
	cmd     *exec.Cmd
	journal *journal
	said    *transcript
	exited  chan struct{} // closed when it has ended and all that it wrote is read
	err     error         // how it ended; to be read once exited is closed
}

// proxyArgs is the command line of the proxy.
func proxyArgs(manifests string) []string {
	return []string{"sluice", "run", "--manifests", manifests, "--hostname-override", "node-a",
		"--service-cidr", serviceCIDR4 + "," + serviceCIDR6,
		"--access-log", "-", "--access-log-format", "json", "--logging-format", "json"}
}

// proxyCommand returns it for people.
func proxyCommand(manifests string) string { return strings.Join(proxyArgs(manifests), " ") }

// startProxy runs the proxy on a directory of manifests and waits until the
// first configuration is in force.
func startProxy(ctx context.Context, manifests string) (*proxy, error) {
	p := &proxy{cmd: exec.Command(self), journal: newJournal(), said: newTranscript(), exited: make(chan struct{})}
	p.cmd.Args = proxyArgs(manifests)
	// A group of its own: Ctrl-C is for this process, which stops it in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	records, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	messages, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	var readers sync.WaitGroup
	readers.Go(func() { p.journal.read(records) })
	readers.Go(func() { p.said.read(messages) })
	go p.wait(&readers)
	if err := p.awaitReady(ctx); err != nil {
		return p, fmt.Errorf("the proxy is ready: %w", err)
	}
	return p, nil
}

func (p *proxy) wait(readers *sync.WaitGroup) {
	readers.Wait()
	p.err = p.cmd.Wait()
	close(p.exited)
}

func (p *proxy) awaitReady(ctx context.Context) error {
	deadline := time.NewTimer(readyPatience)
	defer deadline.Stop()
	select {
	case <-p.said.ready:
		return nil
	case <-p.exited:
		return p.ended()
	case <-deadline.C:
		return fmt.Errorf("not within %v", readyPatience)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ended says how the proxy ended. It must have.
func (p *proxy) ended() error {
	if p.err == nil {
		return errors.New("it ended by itself")
	}
	return fmt.Errorf("it ended: %w", p.err)
}

// stop ends the proxy in order, and by force if it does not end. It gives an
// error if it did not end in order. It may be called again.
func (p *proxy) stop() error {
	select {
	case <-p.exited:
	default:
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
	}
	deadline := time.NewTimer(stopPatience)
	defer deadline.Stop()
	select {
	case <-p.exited:
	case <-deadline.C:
		_ = p.cmd.Process.Kill()
		<-p.exited
		return fmt.Errorf("the proxy did not stop within %v", stopPatience)
	}
	if p.err != nil {
		return fmt.Errorf("the proxy stopped with %w", p.err)
	}
	return nil
}

// transcript keeps what a process says, the last lines of it, and waits for the
// message "ready".
type transcript struct {
	ready chan struct{} // closed

	mu    sync.Mutex // guards what follows
	lines []string
	done  bool // ready is closed
}

// transcriptLines bounds what is kept.
const transcriptLines = 200

func newTranscript() *transcript { return &transcript{ready: make(chan struct{})} }

func (t *transcript) read(from io.Reader) {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			t.add(strings.TrimRight(line, "\n"))
		}
		if err != nil {
			return
		}
	}
}

func (t *transcript) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) >= transcriptLines {
		t.lines = append(t.lines[:0], t.lines[1:]...)
	}
	t.lines = append(t.lines, line)
	if !t.done && isReady(line) {
		t.done = true
		close(t.ready)
	}
}

func (t *transcript) text() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.lines...)
}

func isReady(line string) bool {
	var entry struct {
		Message string `json:"message"`
	}
	return json.NewDecoder(bytes.NewReader([]byte(line))).Decode(&entry) == nil && entry.Message == "ready"
}
