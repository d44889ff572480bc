package conntrack

import "github.com/sluice-proxy/sluice/service"

// Transport is what the transport of an open connection says at the moment that somebody
// looks, or of a TCP connection when it ends (Options.TCP). Who asks for it pays for it.
type Transport struct {
	// Idle is the time in ns since the last bytes or datagrams of either side; of a kernel
	// flow, since its last packet.
	Idle             int64
	Client, Endpoint Side
}

// Side is what TCP knows of one peer. Its zero value knows nothing.
type Side struct {
	// Known is how much of the rest is known.
	Known Known
	// RTT is the round-trip time to the peer in ns; of a kernel flow, that of the
	// handshake. 0 if it was not measured.
	RTT int64
	// Idle is the time in ns since the peer's last bytes; of a kernel flow, since its last
	// packet.
	Idle int64
	// Unacked are the bytes for the peer that it has not acknowledged, Unsent those of them
	// that were not sent yet, because it or the network takes no more.
	Unacked, Unsent uint64
	// Window is how many bytes the peer takes now.
	Window uint32
	// Retransmits are the segments that were sent again, Unanswered the repetitions and
	// window probes since the peer's last acknowledgement. Of a kernel flow, the segments
	// have come by here more than once.
	Retransmits, Unanswered uint32
	// Lost are the peer's segments that were lost on their way here, so that it has sent
	// them again.
	Lost uint32
}

// Known says where the fields of a Side are from.
type Known uint8

const (
	// Nothing is known.
	Nothing Known = iota
	// ByPackets are RTT, Idle, Unacked, Retransmits and Lost: what forwarded packets say.
	ByPackets
	// BySocket are all fields but Lost: our socket to the peer says them (TCP_INFO).
	BySocket
)

// Inspector is an Owner or a Keeper that can ask its connection's transport. It is called on
// the connection's event loop.
type Inspector interface {
	Inspect(*Transport)
}

// Transport returns what the transport says, in a copy that Inspect, Find and EndInspected of
// Table show, and what that of a TCP connection said in a record (Options.TCP); nil in others,
// and where nothing is known. That of a record never changes.
func (r *Record) Transport() *Transport {
	t, _ := r.Owner.(*Transport)
	return t
}

// SetTransport sets what Transport returns of a copy.
func (r *Record) SetTransport(t *Transport) { r.Owner = t }

// inspect asks the transport of a copy's connection. The answer is in the given place.
func (r *Record) inspect(owner any, in *Transport) {
	if i, ok := owner.(Inspector); ok {
		*in = Transport{}
		i.Inspect(in)
		r.SetTransport(in)
	}
}

// transportChunk is how many records share an allocation for what their transports say.
const transportChunk = 128

// Note asks the transport of an open connection for the record that Close makes. Close does so
// itself; its caller calls Note first if it has to close the connection's sockets before.
func (s *Shard) Note(r *Record) {
	if t := s.ask(r); t != nil {
		r.SetTransport(t)
	}
}

// ask returns what the transport of a TCP connection says, or has said to Note; nil if records
// do not have that.
func (s *Shard) ask(r *Record) *Transport {
	i, ok := r.Owner.(Inspector)
	if !ok || !s.table.tcp || r.Protocol != service.TCP || !s.table.wants(r) {
		return r.Transport()
	}
	if len(s.transports) == 0 {
		s.transports = make([]Transport, transportChunk)
	}
	t := &s.transports[0]
	s.transports = s.transports[1:]
	i.Inspect(t)
	return t
}

// RTT returns the longer round-trip time of both sides in ns; false if none is known.
func (t *Transport) RTT() (ns int64, ok bool) {
	ns = max(t.Client.RTT, t.Endpoint.RTT)
	return ns, ns > 0
}

// Retransmits returns the segments that were sent again, to both sides and by them as they
// were lost on their way here; false if nobody counts them.
func (t *Transport) Retransmits() (n int64, ok bool) {
	for _, s := range []*Side{&t.Client, &t.Endpoint} {
		n += int64(s.Retransmits) + int64(s.Lost)
		ok = ok || s.Known != Nothing
	}
	return n, ok
}

// Unacked returns the bytes that both sides have not acknowledged; false if nobody knows.
func (t *Transport) Unacked() (n int64, ok bool) {
	return int64(t.Client.Unacked + t.Endpoint.Unacked), t.Client.Known != Nothing || t.Endpoint.Known != Nothing
}

// append appends the fields of JSON.
func (t *Transport) append(b []byte) []byte {
	b = appendMicroseconds(b, `,"idle_us":`, t.Idle)
	b = t.Client.append(b, [...]string{
		`,"client_rtt_us":`, `,"client_idle_us":`, `,"client_unacked":`, `,"client_unsent":`,
		`,"client_window":`, `,"client_retransmits":`, `,"client_lost":`,
	})
	return t.Endpoint.append(b, [...]string{
		`,"endpoint_rtt_us":`, `,"endpoint_idle_us":`, `,"endpoint_unacked":`, `,"endpoint_unsent":`,
		`,"endpoint_window":`, `,"endpoint_retransmits":`, `,"endpoint_lost":`,
	})
}

func (s *Side) append(b []byte, keys [7]string) []byte {
	if s.RTT > 0 {
		b = appendMicroseconds(b, keys[0], s.RTT)
	}
	if s.Known != Nothing {
		b = appendMicroseconds(b, keys[1], s.Idle)
		b = appendNumber(b, keys[2], s.Unacked)
	}
	if s.Known == BySocket {
		b = appendNumber(b, keys[3], s.Unsent)
		b = appendNumber(b, keys[4], uint64(s.Window))
	}
	if s.Known != Nothing {
		b = appendNumber(b, keys[5], uint64(s.Retransmits))
	}
	if s.Known == ByPackets {
		b = appendNumber(b, keys[6], uint64(s.Lost))
	}
	return b
}
