package node

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// ports opens the listening sockets of health checks and metrics. Those of the process before
// take the place of new ones, and accept nothing until this process serves. Its methods are
// safe for concurrent use.
type ports struct {
	mu        sync.Mutex
	open      map[string]*port // guarded by mu
	inherited map[string]net.Listener
	waiting   chan struct{} // closed when this process serves; nil: it does
}

// portPrefix begins the names of these sockets in a take-over.
const portPrefix = "HTTP "

// port is a listening socket of ports.
type port struct {
	net.Listener
	ports   *ports
	name    string
	waiting <-chan struct{}
	closed  chan struct{}
	close   sync.Once
}

// Listen opens a socket, or takes that of the process before.
func (p *ports) Listen(network, address string) (net.Listener, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &port{ports: p, name: fmt.Sprintf("%s%s %s", portPrefix, network, address), closed: make(chan struct{})}
	if before := p.inherited[l.name]; before != nil {
		delete(p.inherited, l.name)
		l.Listener, l.waiting = before, p.waiting
	} else {
		var c net.ListenConfig
		c.SetMultipathTCP(false) // nothing needs it
		var err error
		if l.Listener, err = c.Listen(context.Background(), network, address); err != nil {
			return nil, err
		}
	}
	if p.open == nil {
		p.open = make(map[string]*port)
	}
	p.open[l.name] = l
	return l, nil
}

// Accept implements net.Listener.
func (l *port) Accept() (net.Conn, error) {
	if l.waiting != nil {
		select {
		case <-l.waiting:
		case <-l.closed:
			return nil, net.ErrClosed
		}
	}
	return l.Listener.Accept()
}

// Close implements net.Listener.
func (l *port) Close() error {
	l.close.Do(func() { close(l.closed) })
	l.ports.mu.Lock()
	defer l.ports.mu.Unlock()
	if l.ports.open[l.name] == l {
		delete(l.ports.open, l.name)
	}
	return l.Listener.Close()
}

// sockets returns duplicates for the process that takes over. The caller closes them.
func (p *ports) sockets() (list []handover.Socket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, l := range p.open {
		c, is := l.Listener.(syscall.Conn)
		if !is {
			continue
		}
		if fd, err := sys.Duplicate(c); err == nil { // else the next process waits until it is free
			list = append(list, handover.Socket{Name: name, FD: fd})
		}
	}
	return list
}

// inherit takes the sockets of the process before.
func (p *ports) inherit(from *handover.Sockets) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inherited, p.waiting = make(map[string]net.Listener), make(chan struct{})
	for _, name := range from.Names() {
		if !strings.HasPrefix(name, portPrefix) {
			continue
		}
		for _, s := range from.Take(name) {
			f := os.NewFile(uintptr(s.FD), name)
			if l, err := net.FileListener(f); err == nil { // else it is opened anew
				p.inherited[name] = l
			}
			_ = f.Close()
		}
	}
}

// serve makes the inherited sockets accept, and closes those that were not claimed.
func (p *ports) serve() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting == nil {
		return
	}
	close(p.waiting)
	p.waiting = nil
	for _, l := range p.inherited {
		_ = l.Close()
	}
	p.inherited = nil
}
