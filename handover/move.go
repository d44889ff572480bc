package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"
)

// Moved is an open connection on its way from the running process to the next.
type Moved struct {
	Kind  string          `json:"kind"` // what it is
	State json.RawMessage `json:"state"`
	Count int             `json:"count"` // of FDs
	FDs   []int           `json:"-"`     // of this process
}

// movePatience bounds how long connections are with neither process because the next one does
// not say that they have arrived.
const movePatience = 5 * time.Second

// MostMoved limits the descriptors of the connections of one call of Move: in a larger batch the
// first would wait too long for the last.
const MostMoved = batch

// Move sends open connections, which must be at rest, to the next process, and reports for each
// whether it was taken. The caller closes the descriptors of those that were, and keeps the
// others. After an error no more can be moved; connections without an answer stay, too: the next
// process closes its copies.
func (c *Conn) Move(list []Moved) (taken []bool, err error) {
	taken = make([]bool, len(list))
	for first := 0; first < len(list); {
		n, bytes := 0, 0
		var fds []int
		for first+n < len(list) {
			m := &list[first+n]
			m.Count = len(m.FDs)
			bytes += len(m.State) + 64
			if n > 0 && (bytes > batchBytes || len(fds)+m.Count > batch) {
				break
			}
			fds = append(fds, m.FDs...)
			n++
		}
		kept, err := c.moveBatch(list[first:first+n], fds)
		if err != nil {
			return taken, err
		}
		for i := range n {
			taken[first+i] = true
		}
		for _, i := range kept {
			if i >= 0 && i < n {
				taken[first+i] = false
			}
		}
		first += n
	}
	return taken, nil
}

func (c *Conn) moveBatch(list []Moved, fds []int) (kept []int, err error) {
	if err := c.send(&Message{Step: StepMoved, Moved: list}, fds); err != nil {
		return nil, err
	}
	m, err := c.Await(StepTaken, movePatience)
	if err == nil && m.Taken != len(fds) {
		err = fmt.Errorf("%d of %d descriptors have arrived", m.Taken, len(fds))
	}
	if err == nil {
		err = c.Send(&Message{Step: StepYours})
	}
	if err != nil {
		_ = c.Send(&Message{Step: StepMine}) // it is gone, or reads it before the connection's end
		return nil, err
	}
	return m.Kept, nil
}

// Taken is a moved connection that has arrived, and is not this process's yet.
type Taken interface {
	// Begin serves the connection.
	Begin()
	// Discard closes the descriptors: the other process keeps the connection.
	Discard()
}

// TakeMoved receives one batch of open connections, and returns how many were taken. accept
// returns nil for a connection that stays with the other process. The error is io.EOF once the
// other process has ended; connections taken by then are served. It is a *StayedError if the
// batch stays with the other process; then TakeMoved may be called again. learn gets the states
// that come meanwhile. Other messages are ignored.
func (c *Conn) TakeMoved(accept func(*Moved) Taken, learn func([]State)) (n int, err error) {
	m, fds, err := c.receive(0)
	if err == nil && m.Step == StepState {
		learn([]State{*m.State})
	}
	return c.takeBatch(m, fds, err, accept, 0)
}

// TakeFirst receives the sessions that come before this process serves, until the other one says
// that this was all, and returns how many are this process's now. It waits for each message no
// longer than connections may be with neither process; if the other one stands still, nothing
// more can come from it. An error says why something stays with the other process.
func (c *Conn) TakeFirst(accept func(*Moved) Taken) (n int, err error) {
	for {
		m, fds, failed := c.receive(movePatience)
		if failed == nil && m.Step == StepOver {
			return n, err
		}
		more, failed := c.takeBatch(m, fds, failed, accept, movePatience)
		n += more
		var stayed *StayedError
		switch {
		case errors.As(failed, &stayed):
			err = failed // it says that this was all
		case failed != nil:
			c.StopTaking()
			return n, failed
		}
	}
}

// takeBatch is TakeMoved once receive has answered. patience bounds the wait for the other
// process's last word.
func (c *Conn) takeBatch(m *Message, fds []int, err error, accept func(*Moved) Taken, patience time.Duration) (n int, _ error) {
	if errors.Is(err, errUnread) {
		if said := c.Send(&Message{Step: StepTaken}); said != nil {
			return 0, said
		}
		return 0, &StayedError{err}
	}
	if err != nil {
		return 0, err
	}
	if m.Step != StepMoved {
		closeAll(fds)
		return 0, nil
	}
	var list []Taken
	answer := Message{Step: StepTaken, Taken: len(fds)}
	for i := range m.Moved {
		each := &m.Moved[i]
		each.FDs, fds = fds[:each.Count], fds[each.Count:]
		if t := accept(each); t != nil {
			list = append(list, t)
		} else {
			closeAll(each.FDs)
			answer.Kept = append(answer.Kept, i)
		}
	}
	_ = c.Send(&answer) // it fails if the other process has ended, which the wait finds out
	// The other process may stand still: until it speaks or ends, they are not ours.
	_, err = c.Await(StepYours, patience)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.StopTaking()
		_, err = c.Await(StepYours, patience) // what it had said by then
	}
	if err != nil && (!Gone(err) || c.stopped.Load()) {
		for _, t := range list {
			t.Discard()
		}
		return 0, &StayedError{err}
	}
	for _, t := range list {
		t.Begin()
	}
	return len(list), err
}

// StopTaking ends TakeMoved. Connections that the other process has not confirmed yet stay there.
func (c *Conn) StopTaking() {
	c.stopped.Store(true)
	_ = c.unix.CloseRead() // what was sent before can be read, and the other process can send no more
}

// StayedError says why a batch of connections stays with the running process.
type StayedError struct{ why error }

// Error returns the reason.
func (e *StayedError) Error() string { return e.why.Error() }

var errCounts = errors.New("connections with other descriptors than they say")

// counted checks that a message has as many descriptors as its connections need.
func (m *Message) counted(fds int) error {
	n := 0
	for i := range m.Moved {
		if m.Moved[i].Count < 0 {
			return errCounts
		}
		n += m.Moved[i].Count
	}
	if n != fds {
		return errCounts
	}
	return nil
}
