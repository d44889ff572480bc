package handover

import (
	"fmt"
	"os"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Each process proves to the other one that it has CAP_NET_ADMIN in the initial user namespace:
// it sends a descriptor of its own end of the connection, with a receive buffer that is larger than
// a process without that capability can make it. That works where the two cannot see each other in
// /proc, such as in two pods with the host's network.
//
// The names of both ends prove that the descriptor belongs to this connection: the next process
// binds its end to a unique name. A stranger who gets such a descriptor cannot use it for another
// connection: the name stays in use while the descriptor is open.

// prove sends this process's proof. Without the right for it, the end is sent as it is.
func (c *Conn) prove(running *Running) error {
	fd, err := sys.Duplicate(c.unix)
	if err != nil {
		return err
	}
	defer sys.Close(fd)
	_ = sys.ForceBuffer(fd) // the other one decides
	return c.send(&Message{Step: StepProof, Running: running}, []int{fd})
}

// verify waits for the other process's proof. In a user namespace there is none; then it has to
// be visible from here. The error is a *StrangerError if it may not steer.
func (c *Conn) verify() error {
	peer, err := sys.PeerCredentials(c.unix)
	if err != nil {
		return err
	}
	stranger := &StrangerError{int(peer.Pid), peer.Uid}
	if int(peer.Uid) != os.Geteuid() {
		return stranger
	}
	m, fds, err := c.receive(Patience)
	if err != nil {
		return fmt.Errorf("wait for %s: %w", StepProof, err)
	}
	defer closeAll(fds)
	if err := m.is(StepProof); err != nil {
		return err
	}
	if m.Running != nil {
		c.running = *m.Running
	}
	if len(fds) == 1 && c.isPeer(fds[0]) {
		if forced, err := sys.HasForcedBuffer(fds[0]); err == nil && forced {
			return nil
		}
	}
	if peer.Pid != 0 {
		if is, err := sys.IsNetAdmin(int(peer.Pid), peer.Uid); err == nil && is {
			return nil
		}
	}
	return stranger
}

// isPeer reports whether a descriptor is of the other end of the connection.
func (c *Conn) isPeer(fd int) bool {
	theirs, ours, err := sys.UnixNames(fd)
	return err == nil && theirs == c.unix.RemoteAddr().String() && ours == c.unix.LocalAddr().String()
}
