package datagram

import (
	"errors"
	"io/fs"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// replySocketIdle is how long a reply socket without sessions stays open.
	replySocketIdle = 10 * time.Second
	// replySocketRetry is the time until the next attempt after a failure to open a
	// reply socket.
	replySocketRetry = time.Second
)

// replySocket sends replies from the destination that clients sent to, and receives
// nothing. It is bound to the destination's port, and to an address that nobody sends to
// (see aside): a socket at the destination itself would share its datagrams with every
// other one there, and would take the port from a program that gives the address to this
// node. Each datagram names the address that it leaves from.
type replySocket struct {
	worker  *worker
	address netip.AddrPort
	source  netip.Addr // of its datagrams; invalid if the socket is bound to it
	fd      int        // -1 after a failure, until the timer fires
	users   int        // sessions
	timer   poll.Timer
	listens bool // the socket is a listener's, which closes it
	raw     bool // a raw socket, because another program has the port on all addresses
	noGSO   bool // the kernel does not send GSO batches from it
}

// replySocketFor returns the reply socket of a destination for one more session, or
// nil if it cannot be opened.
func (w *worker) replySocketFor(address netip.AddrPort) *replySocket {
	o := w.replySockets[address]
	if o == nil {
		o = &replySocket{worker: w, address: address}
		w.replySockets[address] = o
		if !o.open() {
			o.fd = -1
			w.loop.Schedule(&o.timer, w.loop.Now()+int64(replySocketRetry), o)
		}
	}
	if o.fd < 0 {
		return nil
	}
	w.loop.Cancel(&o.timer)
	return o
}

// open opens the socket. If a server of the host is bound to the port on all addresses,
// the port cannot be bound (F4): then a raw socket sends the datagrams.
func (o *replySocket) open() bool {
	s := o.worker.server
	fd, err := sys.BindUDP(netip.AddrPortFrom(aside(o.address.Addr()), o.address.Port()),
		sys.UDPOptions{Transparent: true, FreeBind: true, ReuseAddr: true, Deaf: true})
	o.source = o.address.Addr()
	if err != nil && InUse(err) {
		s.stats.Conflicts.Add(1)
		o.warn(o.address.String(), nil, "another program on this node has this UDP port on all addresses: answers leave by a raw socket, which is slower")
		o.raw, o.source = true, netip.Addr{}
		fd, err = sys.RawUDP(o.address.Addr())
	}
	if err != nil {
		cause := err
		for next := cause; next != nil; next = errors.Unwrap(next) {
			cause = next // without the destination, so that one cause is one text
		}
		o.warn(cause.Error(), err, "UDP answers cannot be sent from this destination: its clients are not served; tried again each second"+o.missing(err))
		return false
	}
	o.fd = fd
	return true
}

// aside returns the address that the reply socket of an address is bound to: one of
// 127.84.0.0/16, or of 100::/64, which routers discard (RFC 6666), with the same last
// bytes. So the kernel finds few sockets at each, however many Services have the port.
func aside(a netip.Addr) netip.Addr {
	if a.Is4() {
		b := a.As4()
		return netip.AddrFrom4([4]byte{127, 84, b[2], b[3]})
	}
	b := a.As16()
	return netip.AddrFrom16([16]byte(append([]byte{1, 0, 0, 0, 0, 0, 0, 0}, b[8:]...)))
}

// warn logs a message at most once a minute for each cause.
func (o *replySocket) warn(cause string, err error, text string) {
	s := o.worker.server
	unsaid, ok := s.warnings.due(cause, o.worker.loop.Now())
	if !ok {
		return
	}
	e := s.options.Logger.Warn().Err(err).Stringer("destination", o.address)
	if unsaid > 0 {
		e.Int("times_since", unsaid)
	}
	e.Msg(text)
}

// missing names the capability that the socket needs if err is a permission error.
func (o *replySocket) missing(err error) string {
	switch {
	case !errors.Is(err, fs.ErrPermission):
		return ""
	case o.raw:
		return ". The raw socket needs CAP_NET_RAW"
	}
	return ". A port below net.ipv4.ip_unprivileged_port_start needs CAP_NET_BIND_SERVICE"
}

// release says that a session does not use the replySocket any more.
func (o *replySocket) release() {
	if o.users--; o.users == 0 && !o.listens {
		o.worker.loop.Schedule(&o.timer, o.worker.loop.Now()+int64(replySocketIdle), o)
	}
}

// HandleTimer closes a reply socket without sessions.
func (o *replySocket) HandleTimer(*poll.Timer) { o.close() }

func (o *replySocket) close() {
	w := o.worker
	if w.downSocket == o {
		w.flushDown()
	}
	delete(w.replySockets, o.address)
	if o.fd >= 0 {
		sys.Close(o.fd)
	}
}
