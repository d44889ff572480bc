package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// self is the program that runs, also when its file was replaced meanwhile.
const self = "/proc/self/exe"

const (
	readyPatience = 20 * time.Second
	stopPatience  = 15 * time.Second
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
		"--service-cidr", serviceCIDRs[v4].String() + "," + serviceCIDRs[v6].String(),
		"--datapath", "relay", "--access-log", "-", "--access-log-format", "json", "--logging-format", "json"}
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
	records, messages := lineWriter{line: p.journal.line}, lineWriter{line: p.said.add}
	p.cmd.Stdout, p.cmd.Stderr = &records, &messages
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	go func() {
		p.err = p.cmd.Wait()
		records.end()
		messages.end()
		p.journal.end()
		close(p.exited)
	}()
	if err := p.awaitReady(ctx); err != nil {
		return p, fmt.Errorf("the proxy is ready: %w", err)
	}
	return p, nil
}

func (p *proxy) awaitReady(ctx context.Context) error {
	select {
	case <-p.said.ready:
		return nil
	case <-p.exited:
		return p.ended()
	case <-time.After(readyPatience):
		return fmt.Errorf("not within %v", readyPatience)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *proxy) gone() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
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
	if !p.gone() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
	}
	select {
	case <-p.exited:
	case <-time.After(stopPatience):
		_ = p.cmd.Process.Kill()
		<-p.exited
		return fmt.Errorf("the proxy did not stop within %v", stopPatience)
	}
	if p.err != nil {
		return fmt.Errorf("the proxy stopped with %w", p.err)
	}
	return nil
}

// lineWriter passes on what is written, line by line.
type lineWriter struct {
	line func(string)
	rest []byte
}

// Write implements io.Writer.
func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, ok := bytes.Cut(w.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		w.line(string(line))
		w.rest = rest
	}
}

// end passes on what was not ended by a line break.
func (w *lineWriter) end() {
	if len(w.rest) > 0 {
		w.line(string(w.rest))
	}
}

// transcript keeps what a process says, the last lines of it, and waits for the
// message "ready".
type transcript struct {
	ready   chan struct{} // closed
	isReady func()

	mu    sync.Mutex // guards what follows
	lines []string
}

// transcriptLines bounds what is kept.
const transcriptLines = 200

func newTranscript() *transcript {
	t := &transcript{ready: make(chan struct{})}
	t.isReady = sync.OnceFunc(func() { close(t.ready) })
	return t
}

func (t *transcript) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, line)
	t.lines = t.lines[max(len(t.lines)-transcriptLines, 0):]
	var entry struct{ Message string }
	if json.Unmarshal([]byte(line), &entry) == nil && entry.Message == "ready" {
		t.isReady()
	}
}

func (t *transcript) text() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.lines)
}
