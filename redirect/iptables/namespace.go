package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// namespace is the network namespace that programs run in.
type namespace struct {
	number int      // its descriptor
	file   *os.File // to be closed; nil if it is somebody else's
}

// openNamespace takes a descriptor, or the namespace that it is called in.
func openNamespace(fd int) (*namespace, error) {
	if fd != 0 {
		return &namespace{number: fd}, nil
	}
	return openedNamespace(sys.OwnNetNS())
}

// scratchNamespace makes an empty one.
func scratchNamespace() (*namespace, error) { return openedNamespace(sys.NewNetNS()) }

func openedNamespace(f *os.File, err error) (*namespace, error) {
	if err != nil {
		return nil, err
	}
	return &namespace{number: int(f.Fd()), file: f}, nil
}

func (n *namespace) fd() int { return n.number }

func (n *namespace) close() {
	if n.file != nil {
		_ = n.file.Close()
	}
}

// do runs f in the namespace, on a thread of its own.
func (n *namespace) do(f func() error) error { return sys.InNetNS(n.number, f) }

// hasFamily reports whether the kernel speaks a version of IP there. Where it
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

// denied reports whether a program said that it may not do what it was told, or could
// not be started in the namespace for that.
func denied(err error) bool {
	var p *programError
	return errors.Is(err, os.ErrPermission) || errors.As(err, &p) && (strings.Contains(p.text, "Permission denied") || strings.Contains(p.text, "not permitted"))
}

// shorten returns a program's complaint in one line.
func shorten(text string) string {
	const most = 300
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		return text[:most] + "…"
	}
	return text
}
