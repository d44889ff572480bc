package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// batch is the most descriptors of a message (SCM_MAX_FD).
	batch = 253
	// batchBytes bounds the names of a batch.
	batchBytes = maxMessage / 2
	// clientsBatch is the most addresses of a message.
	clientsBatch = 1000
)

// Conn is the connection of two processes. It belongs to one goroutine at a time, except
// Close and StopTaking.
type Conn struct {
	unix    *net.UnixConn
	stopped atomic.Bool // StopTaking was called
	buffer  []byte      // of receive
	running Running
}

// Running returns what the other process, which is the running one, does.
func (c *Conn) Running() Running { return c.running }

// PID returns the other process's number; 0 if it cannot be seen from this process's PID namespace.
func (c *Conn) PID() int {
	peer, err := sys.PeerCredentials(c.unix)
	if err != nil {
		return 0
	}
	return int(peer.Pid)
}

// Close ends the connection. The other process sees that.
func (c *Conn) Close() error { return c.unix.Close() }

// Send sends a message without descriptors.
func (c *Conn) Send(m *Message) error { return c.send(m, nil) }

func (c *Conn) send(m *Message, fds []int) error {
	p, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_ = c.unix.SetWriteDeadline(time.Now().Add(Patience)) // the write fails if the socket is closed
	if err := sys.SendDescriptors(c.unix, p, fds); err != nil {
		return fmt.Errorf("send %s: %w", m.Step, err)
	}
	return nil
}

// Receive waits for a message without descriptors; patience 0 waits for as long as the
// connection lasts. The error is io.EOF if it has ended.
func (c *Conn) Receive(patience time.Duration) (*Message, error) {
	m, fds, err := c.receive(patience)
	if err != nil {
		return nil, err
	}
	if len(fds) > 0 {
		closeAll(fds)
		return nil, fmt.Errorf("%s with %d descriptors", m.Step, len(fds))
	}
	return m, nil
}

// Await is Receive of a certain step. A refusal is a *RefusedError.
func (c *Conn) Await(want Step, patience time.Duration) (*Message, error) {
	m, err := c.Receive(patience)
	if err != nil {
		return nil, fmt.Errorf("wait for %s: %w", want, err)
	}
	return m, m.is(want)
}

// RefusedError is the other process's refusal.
type RefusedError struct {
	Why    string
	Switch bool // StepStop would be followed
}

// Error returns the reason.
func (e *RefusedError) Error() string { return e.Why }

func (m *Message) is(want Step) error {
	switch m.Step {
	case want:
		return nil
	case StepRefuse:
		return &RefusedError{m.Why, m.Switch}
	}
	return fmt.Errorf("%s in place of %s", m.Step, want)
}

// errUnread says that a message came and cannot be used.
var errUnread = errors.New("cannot read a message")

// receive returns a message and its descriptors. If the message cannot be read or descriptors are
// missing, it closes those that came and returns errUnread.
func (c *Conn) receive(patience time.Duration) (*Message, []int, error) {
	deadline := time.Time{}
	if patience > 0 {
		deadline = time.Now().Add(patience)
	}
	_ = c.unix.SetReadDeadline(deadline) // the read fails if the socket is closed
	if c.buffer == nil {
		c.buffer = make([]byte, maxMessage)
	}
	p := c.buffer // what parse returns keeps nothing of it
	n, fds, whole, err := sys.ReceiveDescriptors(c.unix, p, batch)
	if errors.Is(err, syscall.ECONNRESET) { // it ended without reading all; its own messages can still be read
		n, fds, whole, err = sys.ReceiveDescriptors(c.unix, p, batch)
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	m, err := parse(p[:n])
	if err == nil && (!whole || m.Step == StepSockets && len(fds) != len(m.Sockets)) {
		err = fmt.Errorf("%s: descriptors are missing: %d have arrived; the limit of open files may be too low", m.Step, len(fds))
	}
	if err == nil && m.Step == StepMoved {
		err = m.counted(len(fds))
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, fmt.Errorf("%w: %w", errUnread, err)
	}
	return m, fds, nil
}

// Give sends sockets and addresses of clients. The sockets stay open in this process. Each
// batch has arrived whole when the next one is sent, and all have when Give returns nil.
func (c *Conn) Give(sockets []Socket, clients []netip.Addr) error {
	for len(sockets) > 0 {
		n, bytes := 0, 0
		var fds []int
		for n < min(len(sockets), batch) && (n == 0 || bytes < batchBytes) {
			bytes += len(sockets[n].Name) + 64
			fds = append(fds, sockets[n].FD)
			n++
		}
		if err := c.send(&Message{Step: StepSockets, Sockets: sockets[:n]}, fds); err != nil {
			return err
		}
		m, err := c.Await(StepTaken, Patience)
		if err != nil {
			return err
		}
		if m.Taken != n {
			return fmt.Errorf("%d of %d descriptors have arrived", m.Taken, n)
		}
		sockets = sockets[n:]
	}
	for len(clients) > 0 {
		n := min(len(clients), clientsBatch)
		if err := c.Send(&Message{Step: StepClients, Clients: clients[:n]}); err != nil {
			return err
		}
		clients = clients[n:]
	}
	return c.Send(&Message{Step: StepOver})
}

// Take receives the other process's sockets and clients. After an error all of them are closed.
func (c *Conn) Take() (*Sockets, []netip.Addr, error) {
	all := &Sockets{}
	var clients []netip.Addr
	for {
		m, fds, err := c.receive(Patience)
		if err == nil {
			switch m.Step {
			case StepSockets:
				for i := range m.Sockets {
					m.Sockets[i].FD = fds[i]
					all.add(m.Sockets[i])
				}
				err = c.Send(&Message{Step: StepTaken, Taken: len(fds)})
			case StepState:
				all.States = append(all.States, *m.State)
			case StepClients:
				clients = append(clients, m.Clients...)
			default:
				closeAll(fds)
				if err = m.is(StepOver); err == nil {
					return all, clients, nil
				}
			}
		}
		if err != nil {
			all.Close()
			return nil, nil, fmt.Errorf("take over sockets: %w", err)
		}
	}
}

// Tell sends a State, whose data is written as JSON.
func (c *Conn) Tell(kind string, data any) error {
	p, err := json.Marshal(data)
	if err != nil {
		return err
	}
	return c.Send(&Message{Step: StepState, State: &State{kind, p}})
}

// AwaitStates is Await, and returns the states that come before that step.
func (c *Conn) AwaitStates(want Step, patience time.Duration) (states []State, err error) {
	for {
		m, err := c.Receive(patience)
		if err != nil {
			return states, fmt.Errorf("wait for %s: %w", want, err)
		}
		if m.Step != StepState {
			return states, m.is(want)
		}
		states = append(states, *m.State)
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		sys.Close(fd)
	}
}

// Gone reports whether an error says that the other process has ended the connection.
func Gone(err error) bool { return errors.Is(err, io.EOF) }
