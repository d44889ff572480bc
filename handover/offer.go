package handover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// network is that of the unix sockets: SOCK_SEQPACKET keeps the bounds of messages.
const network = "unixpacket"

// address returns the abstract name of a proxy's offer. It belongs to the network namespace.
func address(proxy string) *net.UnixAddr {
	return &net.UnixAddr{Net: network, Name: "@sluice-handover/" + proxy}
}

// ErrNobody says that no process offers to hand over.
var ErrNobody = errors.New("it offers no take-over")

// Offer is where the next process asks for a take-over.
type Offer struct{ listener *net.UnixListener }

// Listen makes the offer of a proxy.
func Listen(proxy string) (*Offer, error) {
	l, err := net.ListenUnix(network, address(proxy))
	if err != nil {
		return nil, fmt.Errorf("offer to hand over: %w", err)
	}
	return &Offer{l}, nil
}

// Close ends the offer.
func (o *Offer) Close() { _ = o.listener.Close() }

// Accept waits for a process. The error is net.ErrClosed after Close, and a *StrangerError
// about a process that is given nothing; then Accept may be called again.
func (o *Offer) Accept() (*Conn, error) {
	c, err := o.listener.AcceptUnix()
	if err != nil {
		return nil, err
	}
	return trusted(c)
}

// Dial connects to the process that offers a take-over. The error is ErrNobody if there is
// none, and a *StrangerError if another program has the name.
func Dial(proxy string) (*Conn, error) {
	c, err := net.DialUnix(network, nil, address(proxy))
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, ErrNobody
	}
	if err != nil {
		return nil, fmt.Errorf("ask for a take-over: %w", err)
	}
	return trusted(c)
}

// StrangerError says that a process gets, and is believed, nothing.
type StrangerError struct {
	PID int // 0 if it cannot be seen from here
	UID uint32
}

// Error names the process.
func (e *StrangerError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("a process of uid %d may not take part in a take-over: it is in a PID namespace that cannot be seen from here", e.UID)
	}
	return fmt.Sprintf("process %d of uid %d may not take part in a take-over: it is of another user or user namespace, or lacks CAP_NET_ADMIN", e.PID, e.UID)
}

// trusted checks the peer: it has our user, in our user namespace, and may steer. Of one that
// cannot be seen, in another PID namespace, only the user is known: any pod that has the host's
// network and runs as root has the same.
func trusted(c *net.UnixConn) (*Conn, error) {
	peer, err := sys.PeerCredentials(c)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	is := int(peer.Uid) == os.Geteuid() && peer.Pid != 0
	if is {
		is, err = sys.IsNetAdmin(int(peer.Pid), peer.Uid)
		is = is && err == nil
	}
	if !is {
		_ = c.Close()
		return nil, &StrangerError{int(peer.Pid), peer.Uid}
	}
	return &Conn{c}, nil
}
