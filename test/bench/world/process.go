package world

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a program that runs in a namespace until it is stopped.
type Process struct {
	cmd  *exec.Cmd
	log  *tail
	done chan struct{}
}

// Command describes what to start.
type Command struct {
	Path  string
	Args  []string // without the program's name
	Env   []string // added to this process's environment
	Dir   string
	Stdin []byte // the whole input; nil for none
	// OwnPIDs gives the program a PID namespace, so that its children die with it.
	OwnPIDs bool
}

// Start runs a program in the namespace. It is killed when the benchmark ends.
func (n *Namespace) Start(c Command) (*Process, error) {
	p := &Process{log: &tail{limit: 16 << 10}, done: make(chan struct{})}
	p.cmd = n.command(c)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := n.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	go p.wait()
	return p, nil
}

// Run runs a program in the namespace to its end and returns its standard output.
// After limit it is killed and Run fails.
func (n *Namespace) Run(c Command, limit time.Duration) ([]byte, error) {
	var out bytes.Buffer
	log := &tail{limit: 16 << 10}
	cmd := n.command(c)
	cmd.Stdout, cmd.Stderr = &out, log
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	if !timer.Stop() {
		return nil, fmt.Errorf("%s: not done after %v; %s", c.Path, limit, log)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", c.Path, err, log)
	}
	return out.Bytes(), nil
}

// Talk starts a program in the namespace and returns its standard input and
// output. The program should end when its input does.
func (n *Namespace) Talk(c Command) (*Process, io.WriteCloser, io.Reader, error) {
	p := &Process{log: &tail{limit: 16 << 10}, done: make(chan struct{})}
	p.cmd = n.command(c)
	p.cmd.Stderr = p.log
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, nil, nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	if err := n.Do(p.cmd.Start); err != nil {
		return nil, nil, nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	go p.wait()
	return p, in, out, nil
}

func (n *Namespace) command(c Command) *exec.Cmd {
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Dir = c.Dir
	if c.Stdin != nil {
		cmd.Stdin = bytes.NewReader(c.Stdin)
	}
	// The namespace's thread is the parent and lives as long as the namespace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if c.OwnPIDs {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
	}
	return cmd
}

func (p *Process) wait() {
	// Its log says how it ended; here only the end matters.
	_ = p.cmd.Wait()
	close(p.done)
}

// PID is the process's identifier as seen by this process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Log is the end of the process's output.
func (p *Process) Log() string { return p.log.String() }

// Stop asks the process to end, and kills it after three seconds.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return
	case <-time.After(3 * time.Second):
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// tail keeps the last bytes written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	data  []byte // guarded by mu
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, b...)
	if over := len(t.data) - t.limit; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.data))
}
