package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netns"
)

// namespace is the network namespace that programs run in.
type namespace struct {
	handle netns.NsHandle
	ours   bool // the handle is to be closed
}

// openNamespace takes a descriptor, or the namespace that it is called in.
func openNamespace(fd int) (*namespace, error) {
	if fd != 0 {
		return &namespace{handle: netns.NsHandle(fd)}, nil
	}
	h, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("own network namespace: %w", err)
	}
	return &namespace{handle: h, ours: true}, nil
}

// scratchNamespace makes an empty one.
func scratchNamespace() (*namespace, error) {
	n := &namespace{ours: true}
	err := onOwnThread(func() (err error) {
		n.handle, err = netns.New()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("scratch network namespace: %w", err)
	}
	return n, nil
}

func (n *namespace) fd() int { return int(n.handle) }

func (n *namespace) close() {
	if n.ours && n.handle.IsOpen() {
		_ = n.handle.Close()
	}
}

// do runs f in the namespace, on a thread of its own.
func (n *namespace) do(f func() error) error {
	return onOwnThread(func() error {
		if err := netns.Set(n.handle); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// onOwnThread runs f on a thread that is locked to a goroutine of its own and
// ends with it unless it can be taken back to where it came from.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("own network namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// hasFamily tells whether the kernel speaks a version of IP there. Where it
// does not, no packet has to be steered.
func (n *namespace) hasFamily(v version) bool {
	if v == v4 {
		return true
	}
	return n.do(func() error {
		_, err := os.Stat("/proc/thread-self/net/if_inet6")
		return err
	}) == nil
}

// patience bounds one call of a program: without ipset, the text for thousands
// of destinations takes iptables seconds.
const patience = time.Minute

// run calls a program in the namespace and gives what it writes.
func (n *namespace) run(input string, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin = strings.NewReader(input)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := n.do(cmd.Start); err != nil {
		return "", fmt.Errorf("%s: %w", filepath.Base(program), err)
	}
	err := cmd.Wait()
	if ctx.Err() != nil {
		err = fmt.Errorf("no end after %v", patience)
	}
	if err != nil {
		return out.String(), &programError{name: filepath.Base(program), text: shorten(problems.String()), err: err}
	}
	return out.String(), nil
}

// programError is what a program that failed said.
type programError struct {
	name, text string
	err        error
}

func (e *programError) Error() string {
	if e.text == "" {
		return fmt.Sprintf("%s: %v", e.name, e.err)
	}
	return e.name + ": " + e.text
}

func (e *programError) Unwrap() error { return e.err }

// denied tells whether a program said that it may not do what it was told.
func denied(err error) bool {
	var p *programError
	return errors.As(err, &p) && (strings.Contains(p.text, "Permission denied") || strings.Contains(p.text, "not permitted"))
}

// shorten gives a program's complaint in one line.
func shorten(text string) string {
	const most = 300
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		return text[:most] + "…"
	}
	return text
}
