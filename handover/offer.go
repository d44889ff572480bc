package handover

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"syscall"
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
type Offer struct {
	listener *net.UnixListener
	running  func() Running
}

// Listen makes the offer of a proxy. running is called by Accept.
func Listen(proxy string, running func() Running) (*Offer, error) {
	l, err := net.ListenUnix(network, address(proxy))
	if err != nil {
		return nil, fmt.Errorf("offer to hand over: %w", err)
	}
	return &Offer{l, running}, nil
}

// Close ends the offer.
func (o *Offer) Close() { _ = o.listener.Close() }

// Accept waits for a process. The error is net.ErrClosed after Close, and a *StrangerError
// about a process that is given nothing; then Accept may be called again.
func (o *Offer) Accept() (*Conn, error) {
	for {
		u, err := o.listener.AcceptUnix()
		if err != nil {
			return nil, err
		}
		c := &Conn{unix: u}
		if err = c.verify(); err == nil {
			running := o.running()
			err = c.prove(&running)
		}
		if err == nil {
			return c, nil
		}
		if _, is := errors.AsType[*StrangerError](err); is {
			_ = c.Send(&Message{Step: StepRefuse, Why: err.Error()})
		}
		_ = c.Close()
		if !Gone(err) { // else it only asks whether somebody is there
			return nil, err
		}
	}
}

// Dial connects to the process that offers a take-over. The error is ErrNobody if there is
// none, and a *StrangerError if another program has the name.
func Dial(proxy string) (*Conn, error) {
	u, err := connect(proxy)
	if err != nil {
		return nil, err
	}
	c := &Conn{unix: u}
	if err = c.prove(nil); err == nil {
		err = c.verify()
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("ask for a take-over: %w", err)
	}
	return c, nil
}

// IsOffered reports whether a process offers a take-over, whoever it is.
func IsOffered(proxy string) bool {
	c, err := connect(proxy)
	if err == nil {
		_ = c.Close()
	}
	return !errors.Is(err, ErrNobody)
}

// connect gives this end a name that no other one has; see prove.
func connect(proxy string) (*net.UnixConn, error) {
	own := address(proxy)
	own.Name += "/" + rand.Text()
	c, err := net.DialUnix(network, own, address(proxy))
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, ErrNobody
	}
	if err != nil {
		return nil, fmt.Errorf("ask for a take-over: %w", err)
	}
	return c, nil
}

// StrangerError says that a process gets, and is believed, nothing.
type StrangerError struct {
	PID int // 0 if it cannot be seen from here
	UID uint32
}

// Error names the process.
func (e *StrangerError) Error() string {
	who := fmt.Sprintf("process %d", e.PID)
	if e.PID == 0 {
		who = "a process of another PID namespace"
	}
	return fmt.Sprintf("%s, of uid %d, may not take part in a take-over: it is of another user or user namespace, or lacks CAP_NET_ADMIN", who, e.UID)
}
