// Package world builds the benchmark's network: three network namespaces, client,
// node and server, joined by two veth pairs, and the rules that steer a service's
// address on the node to the measured relay.
//
// Nothing of it has a name on the machine. A namespace lives as long as the thread
// that created it, and every process in it gets SIGKILL when that thread ends. So
// nothing remains, however the benchmark ends.
package world

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace with a thread of its own. Its methods are safe
// for concurrent use; it serves one call at a time.
type Namespace struct {
	handle netns.NsHandle
	calls  chan call
}

type call struct {
	f      func() error
	result chan<- error
}

// NewNamespace creates an empty network namespace with its loopback interface up.
// It needs CAP_SYS_ADMIN in the caller's user namespace.
func NewNamespace() (*Namespace, error) {
	n := &Namespace{handle: netns.None(), calls: make(chan call)}
	ready := make(chan error)
	go n.serve(ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	if err := n.loopbackUp(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// serve owns the thread. It never unlocks it, so that the runtime ends the
// thread, and with it the namespace, when serve returns.
func (n *Namespace) serve(ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The process's first thread would not end, and /proc/self shows its
		// namespaces: block it and use another thread.
		done := make(chan struct{})
		go func() {
			n.serve(ready)
			close(done)
		}()
		<-done
		runtime.UnlockOSThread()
		return
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		ready <- fmt.Errorf("new network namespace: %w (root is needed)", err)
		return
	}
	handle, err := netns.Get()
	if err != nil {
		ready <- fmt.Errorf("open network namespace: %w", err)
		return
	}
	n.handle = handle
	ready <- nil
	for c := range n.calls {
		c.result <- c.f()
	}
}

// Do runs f on the namespace's thread. Sockets that f opens and processes that
// f starts belong to the namespace.
func (n *Namespace) Do(f func() error) error {
	result := make(chan error)
	n.calls <- call{f, result}
	return <-result
}

// FD is the namespace's descriptor, valid until Close.
func (n *Namespace) FD() int { return int(n.handle) }

// Close ends the namespace's thread and kills all processes in the namespace.
func (n *Namespace) Close() {
	close(n.calls)
	_ = n.handle.Close()
}

func (n *Namespace) loopbackUp() error {
	h, err := netlink.NewHandleAt(n.handle, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("link lo: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("link lo up: %w", err)
	}
	return nil
}
