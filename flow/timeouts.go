package flow

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// confirmation is how long a client may take to complete the handshake.
	confirmation = 10 * time.Second
	// settling is how long a connection keeps its record after the handshake: many end before.
	settling = 100 * time.Millisecond
	// clockTick is the most by which a recorded time may precede its packet.
	clockTick = 10 * time.Millisecond
	// abandoned ends a connection without a packet if no idle timeout is configured:
	// both sides may have vanished. It is that of connection tracking.
	abandoned = 5 * 24 * time.Hour
	// abandonedAssociation is the same for SCTP, whose sides probe each other every 30 seconds
	// unless that is turned off.
	abandonedAssociation = time.Hour
	// streamAge: a UDP session that is used in both directions for longer is a stream.
	streamAge = 2 * time.Second
)

// HandleTimer runs the flow's timer: a retry, the end of an idle flow, or the end of lingering.
// Packets do not reset it: when it fires, the time of the last packet shows whether the flow is idle.
func (f *flow) HandleTimer(*poll.Timer) {
	now := f.worker.loop.Now()
	switch f.state() {
	case bpf.KernelStateASKING:
		if f.isUDP() {
			f.checkSession(now)
			return
		}
		f.silent(now)
	case bpf.KernelStateMOVING:
		if len(f.handshake.data) == 0 {
			f.worker.readNotices()
		}
		f.retry()
	case bpf.KernelStateOPEN:
		if f.isUDP() {
			f.checkSession(now)
			return
		}
		f.opened(f.worker.loopTime(f.shared().Answered)) // if the notice was lost
		f.endHandshake()
		f.checkConnection(now)
	case bpf.KernelStateCLOSED, bpf.KernelStateVACATED:
		if !f.ended { // the notice was lost
			f.closed(f.worker.loopTime(f.shared().Closed), f.seen())
			return
		}
		f.linger(now)
	default:
		f.end(conntrack.Idle, now)
		f.drop()
	}
}

// checkConnection ends a TCP connection, or an association, that is idle.
func (f *flow) checkConnection(now int64) {
	o := &f.worker.server.options
	seen := f.seen()
	port := f.port
	if f.record != nil {
		port = f.record.Port
	}
	const halfClosed = bpf.KernelSeenCLIENT_FIN | bpf.KernelSeenENDPOINT_FIN | bpf.KernelSeenCLIENT_LEAVING
	limit := port.QuietFor(seen&halfClosed != 0, o.IdleTimeout, o.HalfClosedTimeout)
	if limit <= 0 && f.protocol == service.SCTP {
		limit = abandonedAssociation
	} else if limit <= 0 {
		limit = abandoned
	}
	if seen&bpf.KernelSeenCONFIRMED == 0 {
		limit = confirmation
	}
	if due := f.last() + int64(limit+clockTick); now < due {
		if seen&bpf.KernelSeenCONFIRMED != 0 && !f.park() {
			due = min(due, now+int64(confirmation))
		}
		if half := port.QuietFor(true, o.IdleTimeout, o.HalfClosedTimeout); half > 0 {
			due = min(due, now+int64(half)) // one side may close it
		}
		f.worker.loop.Schedule(&f.timer, due, f)
		return
	}
	f.resetBoth()
	end := conntrack.Idle
	if seen&bpf.KernelSeenCONFIRMED == 0 {
		end = conntrack.ClientTimeout
	}
	f.end(end, now)
	f.drop()
}

// checkSession ends a UDP session that is idle.
func (f *flow) checkSession(now int64) {
	if f.handshake != nil && now-f.record.Start >= int64(f.worker.waits.resend) {
		f.endHandshake()
	}
	k := f.shared()
	t := f.service.timeouts.Load()
	limit := t.session
	if k.Answered != 0 && k.Way[1].Last > k.Answered && f.last()-f.record.Start > int64(streamAge) {
		limit = t.stream
	}
	if due := f.last() + int64(limit+clockTick); now < due {
		if f.handshake != nil {
			due = min(due, f.record.Start+int64(f.worker.waits.resend))
		}
		f.worker.loop.Schedule(&f.timer, due, f)
		return
	}
	f.end(conntrack.Idle, now)
	f.drop()
}
