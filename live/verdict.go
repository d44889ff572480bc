package live

import (
	"fmt"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
)

// Judge says who delays an open connection now, or who ended or delayed one that is over:
// one of api.Culprits, with the reason.
func Judge(r *conntrack.Record) api.Verdict {
	switch {
	case r.State() == conntrack.Closed:
		return judgeEnded(r)
	case r.State() == conntrack.Connecting:
		return judgeConnecting(r)
	case r.Transport() == nil || r.Protocol != service.TCP:
		return judgeFirst(r)
	}
	return judgeOpen(r)
}

func verdict(who, format string, args ...any) api.Verdict {
	return api.Verdict{Who: who, Why: fmt.Sprintf(format, args...)}
}

// lasts writes a time in ns.
func lasts(ns int64) string { return amount.Duration(time.Duration(ns)) }

// judgeAttempts says why the last attempt failed.
func judgeAttempts(r *conntrack.Record) api.Verdict {
	if len(r.Failed) == 0 {
		return verdict("node", "no endpoint was tried")
	}
	a := &r.Failed[len(r.Failed)-1]
	switch {
	case a.Error.Own():
		return verdict("node", "this node could not connect: %s", a.Error)
	case a.Error == conntrack.DialDropped:
		return verdict("node", "a rule of this node dropped the handshake with the endpoint for %s", lasts(a.Duration))
	case a.Error == conntrack.DialRefused || a.Error == conntrack.DialReset:
		return verdict("pod", "it refused the connection after %s", lasts(a.Duration))
	}
	return verdict("pod_network", "the handshake with the endpoint failed after %s: %s", lasts(a.Duration), a.Error)
}

func judgeConnecting(r *conntrack.Record) api.Verdict {
	if r.Attempts == 0 && r.WaitTime() > 0 {
		return verdict("node", "the connection has waited %s for a PROXY header, an endpoint or a place", lasts(r.WaitTime()))
	}
	if int(r.Attempts) > len(r.Failed) && len(r.Failed) == 0 {
		return verdict("pod_network", "the endpoint has not answered the handshake for %s", lasts(r.Duration))
	}
	v := judgeAttempts(r)
	if len(r.Failed) > 0 {
		v.Why = fmt.Sprintf("%s; it is attempt %d", v.Why, r.Attempts)
	}
	return v
}

func judgeEnded(r *conntrack.Record) api.Verdict {
	switch r.End {
	case conntrack.ConnectFailed:
		return judgeAttempts(r)
	case conntrack.EndpointReset, conntrack.EndpointAbort:
		return verdict("pod", "it reset the connection after %s", lasts(r.Duration))
	case conntrack.EndpointTimeout:
		return verdict("pod_network", "the endpoint no longer acknowledged what was sent")
	case conntrack.ClientReset, conntrack.ClientAbort:
		if r.FirstByte == 0 && r.BytesFromClient > 0 {
			return verdict("pod", "the client gave up: the endpoint had not answered its %s after %s", amount.Bytes(r.BytesFromClient), lasts(r.Duration))
		}
		return verdict("client", "it reset the connection after %s", lasts(r.Duration))
	case conntrack.ClientTimeout:
		return verdict("client_network", "the client no longer acknowledged what was sent")
	case conntrack.ClientFin, conntrack.EndpointFin, conntrack.ClientShutdown, conntrack.EndpointShutdown:
		return judgeFirst(r)
	}
	return verdict("node", "Sluice ended the connection: %s", r.End)
}

// judgeFirst says what the endpoint's first byte waited for. A handshake takes one round
// trip, and so does an answer beside the endpoint's own time.
func judgeFirst(r *conntrack.Record) api.Verdict {
	if r.FirstByte == 0 {
		return verdict("nobody", "the endpoint has sent nothing")
	}
	waited, answer := r.WaitTime(), r.FirstByte-r.ConnectTime
	connect := r.ConnectTime - waited
	why := fmt.Sprintf("the first byte came %s after the handshake, which took %s", lasts(answer), lasts(connect))
	if r.Protocol == service.UDP { // without a handshake
		why = fmt.Sprintf("the first answer came %s after the first datagram", lasts(r.FirstByte))
	}
	switch t := r.Transport(); {
	case r.FirstByte < r.Duration/2 && r.State() != conntrack.Closed && t != nil && t.Idle > stalled:
		return verdict("nobody", "%s, and nothing has been sent for %s", why, lasts(t.Idle))
	case r.FirstByte < r.Duration/2:
		return verdict("nobody", "%s; the rest of %s is what both sides sent", why, lasts(r.Duration-r.FirstByte))
	case waited > max(connect, answer):
		return verdict("node", "the connection waited %s before it was dialled; %s", lasts(waited), why)
	case len(r.Failed) > 0 && connect > answer:
		return verdict("pod_network", "%s with %d failed attempts", why, len(r.Failed))
	case connect > answer/2:
		return verdict("pod_network", "%s", why)
	}
	return verdict("pod", "%s", why)
}

// stalled is how long a kernel flow's peer may be silent beside bytes that it has not
// acknowledged, and how long both sides may be beside nothing, in ns.
const stalled = int64(time.Second)

// repeating is the time, in ns, after which bytes are lost that were sent again and not acknowledged:
// senders wait at least that long before they repeat.
const repeating = int64(200 * time.Millisecond)

// judgeOpen says what an open TCP connection waits for.
func judgeOpen(r *conntrack.Record) api.Verdict {
	t := r.Transport()
	for _, side := range []struct {
		of            *conntrack.Side
		peer, network string
	}{{&t.Endpoint, "pod", "pod_network"}, {&t.Client, "client", "client_network"}} {
		switch s := side.of; {
		case s.Unacked == 0:
		case s.Known == conntrack.BySocket && s.Unsent > 0 && s.Window == 0:
			return verdict(side.peer, "it does not read: it takes no more, and %s wait for it", amount.Bytes(s.Unacked))
		case s.Unanswered > 0:
			return verdict(side.network, "%s were not acknowledged, though sent again %d times", amount.Bytes(s.Unacked), s.Unanswered)
		case s.Known == conntrack.ByPackets && s.Idle > repeating && s.Retransmits > 0:
			return verdict(side.network, "%s were not acknowledged, and no packet came for %s; %d segments were sent again", amount.Bytes(s.Unacked), lasts(s.Idle), s.Retransmits)
		case s.Known == conntrack.ByPackets && s.Idle > stalled:
			return verdict(side.network, "%s were not acknowledged, and no packet came for %s", amount.Bytes(s.Unacked), lasts(s.Idle))
		}
	}
	switch {
	case r.BytesFromClient == 0 && r.BytesFromEndpoint == 0:
		return verdict("client", "it has sent nothing yet, nor has the endpoint")
	case r.BytesFromEndpoint == 0:
		return verdict("pod", "it has received %s and has not answered for %s", amount.Bytes(r.BytesFromClient), lasts(t.Client.Idle))
	case t.Client.Known != conntrack.BySocket:
		return judgeFirst(r) // an acknowledgement is a packet too
	case t.Client.Idle < t.Endpoint.Idle:
		return verdict("pod", "it has received all, and has not answered for %s", lasts(t.Client.Idle))
	}
	return verdict("client", "it has received all, and has sent nothing for %s", lasts(t.Client.Idle))
}
