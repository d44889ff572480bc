// Package vm runs programs under another kernel: User Mode Linux, a kernel that
// is a program (Debian package user-mode-linux). It boots in a second and needs
// no right that this process does not have, so that tests can see what Sluice
// does where netfilter, or BPF, or anything that is a module there, is missing.
//
//	status, err := vm.Run(ctx, vm.Config{
//		Init:    init,                     // the program test/vm/run, linked statically
//		Command: []string{"/path/to/sluice", "doctor"},
//		Modules: []string{"veth", "ipv6"}, // loaded first; none can be loaded later
//		Output:  os.Stdout,
//	})
//
// The guest's root is the host's, read-only, so that the host's programs run in
// it; /tmp, /run, /root and /dev/shm are empty there, with the folders of the
// command and those of Config put back. The command is root in it. There is no
// network but lo, and what the command makes.
//
// The program test/vm/run does the same from the command line, and serves as
// `go test -exec`.
package vm

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config describes what runs in the guest.
type Config struct {
	// Init is the static binary of test/vm/run: the guest's first process.
	Init string `json:"-"`
	// Command is the program, by its absolute path, and its arguments.
	Command []string
	// Dir is its working directory; by default this process's.
	Dir string
	// Env is its environment, in addition to PATH, HOME and TMPDIR.
	Env []string
	// Modules are loaded before it runs, with their dependencies. Later no module
	// can be loaded, unless the guest is Unlocked.
	Modules  []string
	Unlocked bool
	// Visible are host directories below /tmp and /root that it can see, in
	// addition to the command's and Dir. All others there are hidden.
	Visible []string
	// Writable are host directories that it may write to.
	Writable []string
	// Memory is the guest's, "1G" by default.
	Memory string `json:"-"`
	// Output gets the command's standard output and error.
	Output io.Writer `json:"-"`
	// Started is called with the process group of the guest's kernel, unless it is nil.
	Started func(group int) `json:"-"`
}

// The names that host and guest share.
const (
	jobEnv     = "SLUICE_VM_JOB" // the guest's first process gets it from the kernel's command line
	configFile = "config.json"
	statusFile = "status"
	kernelLog  = "kernel.log"
)

// modulesRoot has a directory for each kernel release.
const modulesRoot = "/usr/lib/uml/modules"

// Available returns an error that names what guests need and this machine lacks,
// or nil.
func Available() error {
	for _, program := range []string{"linux.uml", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w (Debian packages user-mode-linux, gcc)", err)
		}
	}
	return nil
}

// Run boots a guest, runs the command, and returns its exit status. The guest ends
// with the command, or with ctx. An error is a failure of the guest, not of the
// command.
func Run(ctx context.Context, c Config) (status int, err error) {
	if err := Available(); err != nil {
		return 0, err
	}
	job, err := os.MkdirTemp("", "sluice-vm-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(job)
	if err := c.prepare(job); err != nil {
		return 0, err
	}
	shim, err := buildShim(ctx, job)
	if err != nil {
		return 0, err
	}
	log, err := os.Create(filepath.Join(job, kernelLog))
	if err != nil {
		return 0, err
	}
	defer log.Close()
	output, input, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, "linux.uml", "mem="+c.Memory, "rootfstype=hostfs", "rootflags=/", "ro",
		"init="+filepath.Join(job, "init"), jobEnv+"="+job,
		"con0=null,fd:3", "con=null", "ssl=null", "quiet", "loglevel=0", "umid=vm", "uml_dir="+job+"/")
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+shim, "TMPDIR="+memoryDir(job))
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{input}
	// The kernel consists of many processes, which end with their group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	if err := startOnOneCPU(cmd); err != nil {
		return 0, errors.Join(err, input.Close(), output.Close())
	}
	_ = input.Close()
	if c.Started != nil {
		c.Started(cmd.Process.Pid)
	}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(c.Output, output)
		_, _ = io.Copy(io.Discard, output) // the guest must not wait for a reader that has gone
	}()
	err = cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	<-copied
	_ = output.Close()
	if ctx.Err() != nil {
		return 0, fmt.Errorf("guest: %w; its kernel said:\n%s", context.Cause(ctx), tail(job))
	}
	text, readErr := os.ReadFile(filepath.Join(job, statusFile))
	if readErr != nil {
		return 0, fmt.Errorf("guest ended without a word of its command (%w); its kernel said:\n%s", err, tail(job))
	}
	if status, err = strconv.Atoi(string(text)); err != nil {
		return 0, fmt.Errorf("guest: %s", text)
	}
	return status, nil
}

// guests counts the guests of this process.
var guests atomic.Uint32

// startOnOneCPU starts a guest's kernel on one of the CPUs of this process, by turns. Kernel and
// processes of a guest run one at a time: on two CPUs, each switch between them wakes the other.
func startOnOneCPU(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for cpu, skip := 0, int(guests.Add(1))%all.Count(); one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			if skip == 0 {
				one.Set(cpu)
			}
			skip--
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	return errors.Join(cmd.Start(), unix.SchedSetaffinity(0, &all))
}

// prepare fills in defaults and writes everything that the guest needs into the
// job's directory.
func (c *Config) prepare(job string) error {
	if len(c.Command) == 0 || !filepath.IsAbs(c.Command[0]) {
		return fmt.Errorf("guest: command %q: want the absolute path of a program", c.Command)
	}
	if c.Dir == "" {
		dir, err := os.Getwd()
		if err != nil {
			return err
		}
		c.Dir = dir
	}
	if c.Memory == "" {
		c.Memory = "1G"
	}
	if c.Output == nil {
		c.Output = io.Discard
	}
	c.Visible = append([]string{filepath.Dir(c.Command[0]), c.Dir}, c.Visible...)
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(job, configFile), text, 0o600); err != nil {
		return err
	}
	program, err := os.ReadFile(c.Init)
	if err != nil {
		return fmt.Errorf("guest: first process: %w", err)
	}
	return os.WriteFile(filepath.Join(job, "init"), program, 0o755)
}

// memoryDir returns where the file that is the guest's memory belongs: shared memory, if
// that has plenty of room and code may run there, else the job's directory. On a disk,
// each write-back of the file makes the guest fault on the pages that it writes next.
func memoryDir(job string) string {
	const shared, plenty = "/dev/shm", 4 << 30
	var s unix.Statfs_t
	if unix.Statfs(shared, &s) != nil || s.Type != unix.TMPFS_MAGIC || s.Flags&unix.ST_NOEXEC != 0 || s.Bavail*uint64(s.Bsize) < plenty {
		return job
	}
	return shared
}

// tail returns the end of the kernel's log.
func tail(job string) string {
	text, _ := os.ReadFile(filepath.Join(job, kernelLog))
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

//go:embed shim/xstate.c
var shimSource string

// buildShim compiles a library that User Mode Linux needs on CPUs with more
// registers than it knows.
func buildShim(ctx context.Context, job string) (string, error) {
	shim := filepath.Join(job, "xstate.so")
	cmd := exec.CommandContext(ctx, "gcc", "-x", "c", "-O1", "-shared", "-fPIC", "-o", shim, "-", "-ldl")
	cmd.Stdin = strings.NewReader(shimSource)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("gcc: %w\n%s", cmp.Or(context.Cause(ctx), err), out)
	}
	return shim, nil
}
