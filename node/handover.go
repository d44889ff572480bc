package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
)

// offerPatience bounds the wait for the end of the offer of a process that was killed during a
// take-over.
const offerPatience = time.Second

// openOffer lets a later process take over. Serving is more important.
func (p *Proxy) openOffer() {
	var err error
	for began := time.Now(); ; time.Sleep(lockPause) {
		p.offer, err = handover.Listen(p.config.Steering.Table, func() handover.Running { return handover.Running{Mode: p.mode, Flows: p.hasFlows.Load(), Keeps: true} })
		if err == nil || p.before == nil || time.Since(began) > offerPatience {
			break
		}
	}
	if err != nil {
		p.log.Warn().Err(err).Msg("another sluice cannot take over from this one")
	}
}

// untilHandedOver returns a context that ends with ctx, but not while another process takes
// over: a cluster may end this one as soon as the next one runs, which may wait for its API server.
// Config.TakeOverTimeout bounds that time.
func (p *Proxy) untilHandedOver(ctx context.Context) (context.Context, context.CancelFunc) {
	until, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		select {
		case <-ctx.Done():
		case <-until.Done():
			return
		}
		select {
		case p.handing <- struct{}{}:
		default:
			patience := p.config.TakeOverTimeout
			p.log.Info().Dur("at_most", patience).Msg("another sluice takes over; this one ends afterwards")
			select {
			case p.handing <- struct{}{}:
			case <-until.Done():
			case <-time.After(patience):
				p.log.Warn().Msg("the next sluice has not taken over in time; this one ends")
			}
		}
		cancel()
	}()
	return until, cancel
}

// serveOffer hands over to the first process that can take over.
func (p *Proxy) serveOffer(ctx context.Context) {
	stop := context.AfterFunc(ctx, p.offer.Close)
	defer stop()
	var strangers once.Trouble
	for {
		c, err := p.offer.Accept()
		var stranger *handover.StrangerError
		switch {
		case errors.As(err, &stranger):
			if strangers.New(err.Error()) {
				p.log.Warn().Err(err).Msg("a take-over was refused")
			}
			continue
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			select { // such as too many open files
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			continue
		}
		done, err := p.handOver(ctx, c)
		if err != nil {
			p.log.Error().Err(err).Msg("a take-over has failed; this sluice serves on")
		}
		if done {
			return
		}
		_ = c.Close()
	}
}

// handOver speaks with a process that wants to take over, and reports whether it has.
func (p *Proxy) handOver(ctx context.Context, c *handover.Conn) (done bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	m, err := c.Await(handover.StepHello, handover.Patience)
	if handover.Gone(err) {
		return false, nil // it only asks whether this process is there
	}
	if err != nil {
		return false, err
	}
	select {
	case p.handing <- struct{}{}:
		defer func() { <-p.handing }()
	default:
		return false, nil // this process ends
	}
	if other, why := p.refusal(m.Hello); why != nil {
		p.log.Info().Str("because", why.Error()).Msg("a take-over was refused")
		if err := c.Send(&handover.Message{Step: handover.StepRefuse, Why: why.Error(), Switch: other}); err != nil || !other {
			return false, err
		}
		if _, err := c.Await(handover.StepStop, handover.Patience); err != nil {
			return false, err
		}
		p.log.Info().Msg("a sluice that steers otherwise begins; this one ends")
		p.nameNext(c)
		p.replaced <- c // the other one waits for its end
		return true, nil
	}
	p.moves = m.Hello.Moves
	if err := c.Send(&handover.Message{Step: handover.StepWelcome}); err != nil {
		return false, err
	}
	if err := p.giveOwn(c); err != nil {
		return false, err
	}
	// The other one reads its configuration. It may give up.
	if err := p.untilAsked(c); err != nil {
		return false, err
	}
	if !stop() {
		return false, ctx.Err()
	}
	if asked := p.onRun(ctx, func() { err = p.give(c) }); asked != nil {
		return false, asked
	}
	return err == nil, err
}

// refusal returns why a process cannot take over, or nil. other reports whether it can start once
// this one has ended.
func (p *Proxy) refusal(h *handover.Hello) (other bool, why error) {
	if err := h.Fits(); err != nil {
		return false, err
	}
	if own := p.config.Store.ServiceProxyName; h.Proxy != own {
		return false, fmt.Errorf("the running sluice serves the Services of --service-proxy-name=%q, the next one those of %q: stop the running one first, or give the next one names, marks and tables of its own in the kernel", own, h.Proxy)
	}
	if mode := p.steer.Traits().Name; h.Mode != mode {
		return true, errors.New("the running sluice steers by " + mode + ", the next one by " + h.Mode)
	}
	if own := p.numbers(); h.Numbers != "" && h.Numbers != own {
		return true, fmt.Errorf("the running sluice steers with %s, the next one with %s", own, h.Numbers)
	}
	if p.hasFlows.Load() && h.Relays {
		return true, errors.New("the running sluice has kernel flows, the next one relays all")
	}
	return false, nil
}

// giveOwn gives the lock, and the sockets of health checks and metrics.
func (p *Proxy) giveOwn(c *handover.Conn) error {
	sockets := p.ports.sockets()
	defer func() {
		for _, s := range sockets {
			sys.Close(s.FD)
		}
	}()
	lock, err := p.lock.Descriptor()
	if err != nil {
		return err
	}
	sockets = append(sockets, handover.Socket{Name: lockName, FD: lock})
	return c.Give(sockets, nil)
}

// give hands over what serves new connections. It runs on Run's goroutine, so that nothing
// changes meanwhile: connections are accepted and relayed. Datagrams of clients wait in their
// sockets while sessions move. After an error this process goes on.
func (p *Proxy) give(c *handover.Conn) error {
	began := time.Now()
	paused := false
	pause := func() {
		if !paused {
			p.datagram.Pause()
			paused = true
		}
	}
	var clients []netip.Addr
	if replies := p.steer.Traits().Replies; replies.Clients != nil {
		pause() // a new session may need an address that the next process does not know
		clients = replies.Clients.Held()
	}
	told, err := p.tellAffinity(c, 0)
	if err == nil {
		err = p.tellLearnt(c)
	}
	if err == nil {
		err = c.Tell(idsState, p.conntrack.NextID()+idsSpace)
	}
	if err == nil {
		err = c.Give(slices.Concat(p.stream.Sockets(), p.datagram.Sockets()), clients)
	}
	if err == nil {
		_, err = c.Await(handover.StepServing, handover.Patience)
	}
	if err == nil {
		_, err = p.tellAffinity(c, told)
	}
	if err == nil {
		pause()
		err = c.Send(&handover.Message{Step: handover.StepLeaving})
	}
	if err == nil {
		p.moveSessions(c)
		if gone(c) {
			err = errNextGone
		}
	}
	if err != nil {
		if paused {
			p.datagram.Resume()
		}
		p.takeBack()
		return err
	}
	p.leave()
	if p.flows != nil {
		p.within(flowsPatience, "forwarded connections are not handed over", p.flows.handOver)
	}
	p.nameNext(c)
	p.successor = c
	p.log.Info().Dur("took", time.Since(began)).Msg("another sluice has taken over")
	return nil
}

// nameNext reports to the service manager, before this process can end, that the next one is the
// service's main process. Otherwise the manager would end it together with this one.
func (p *Proxy) nameNext(c *handover.Conn) {
	if pid := c.PID(); pid != 0 { // else it is of a container of its own
		p.managed = p.config.Notify(fmt.Sprintf("MAINPID=%d", pid))
	}
}

// takeBack goes on serving.
func (p *Proxy) takeBack() {
	if err := p.lock.Own(); err != nil {
		p.log.Warn().Err(err).Msg("the lock names another process")
	}
	p.maintain()
}

// movePause is the time between two looks for connections that can move.
const movePause = 100 * time.Millisecond

// linger moves the open connections to the next process after a take-over, and serves those that
// stay until they end or for Config.TakeOverTimeout. A signal to end counts only once the next
// process has ended, too: a cluster ends this one as soon as that one is ready.
func (p *Proxy) linger(ctx context.Context) error {
	err := p.tellTotals(p.successor)
	if err == nil {
		err = p.successor.Send(&handover.Message{Step: handover.StepLeft})
	}
	if err != nil {
		p.log.Warn().Err(err).Msg("the next sluice does not answer")
		p.moves = false
	}
	setGC(movingGC)
	timeout := time.NewTimer(p.config.TakeOverTimeout)
	defer timeout.Stop()
	look := time.NewTicker(movePause)
	defer look.Stop()
	var stopped <-chan struct{}
	p.move()
	if err == nil {
		if err := errors.Join(p.tellPast(), p.tellHistory()); err != nil {
			p.log.Warn().Err(err).Msg("the next sluice does not have all records of the past")
		}
	}
	for !p.drained() {
		select {
		case <-look.C:
			if p.move(); stopped == nil && gone(p.successor) {
				p.moves, stopped = false, ctx.Done()
			}
		case now := <-p.departed.timer.C: // of endpoints that went before
			p.endDeparted(context.WithoutCancel(ctx), p.departed.take(now)) // also after a signal to end
		case <-stopped:
			return nil
		case <-timeout.C:
			p.log.Warn().Int64("connections", p.stream.Stats().Open).Int64("udp_sessions", p.datagram.Stats().Sessions.Load()).
				Msg("--take-over-timeout has passed since another sluice took over; what is open ends")
			return nil
		}
	}
	return nil
}

var errNextGone = errors.New("the next sluice has ended; UDP sessions that it had taken are lost")

// gone reports whether the next process has ended: while it runs, it sends nothing unasked.
func gone(c *handover.Conn) bool {
	_, err := c.Receive(time.Millisecond)
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// move moves the connections that can move to the next process.
func (p *Proxy) move() {
	if !p.moves {
		return
	}
	began := time.Now()
	pauses, err := p.stream.Move(p.successor.Move)
	if n := len(pauses); n > 0 {
		slices.Sort(pauses)
		p.log.Info().Int("connections", n).Dur("took", time.Since(began)).Dur("pause_p50", pauses[n/2]).Dur("pause_p99", pauses[n*99/100]).
			Msg("the next sluice has taken over connections")
	}
	if err != nil {
		p.log.Warn().Err(err).Int64("connections", p.stream.Stats().Open).Msg("the next sluice takes no more connections; this one serves them until they end")
		p.moves = false
	}
}

// sessionsPatience bounds the time in which neither process receives clients' datagrams, which
// wait in their sockets' queues of some 1,000 each.
const sessionsPatience = 5 * time.Second

var errSessionsLate = errors.New("moving them takes too long")

// moveSessions moves the UDP sessions to the next process, which waits for them.
func (p *Proxy) moveSessions(c *handover.Conn) {
	if p.moves {
		began := time.Now()
		n, err := p.datagram.Move(func(list []handover.Moved) ([]bool, error) {
			if time.Since(began) > sessionsPatience {
				return make([]bool, len(list)), errSessionsLate
			}
			return c.Move(list)
		})
		if n > 0 {
			p.log.Info().Int("udp_sessions", n).Dur("took", time.Since(began)).Msg("the next sluice has taken over UDP sessions")
		}
		if err != nil {
			p.log.Warn().Err(err).Int64("udp_sessions", p.datagram.Stats().Sessions.Load()).
				Msg("the next sluice takes no more UDP sessions; those here end unless their endpoints send")
		}
	}
	_ = c.Send(&handover.Message{Step: handover.StepOver}) // it may be gone
}

// restPause is the time between two looks at whether somebody steers.
const restPause = time.Second

// rest waits for the signal to end, where a kubelet would otherwise start the container again,
// which would take over in turn. It also returns when no process steers any more.
func (p *Proxy) rest(ctx context.Context) {
	if p.cluster == nil || p.managed || p.successor == nil && p.waiting == nil {
		return
	}
	p.log.Info().Msg("another sluice serves this node; this one waits to be ended")
	look := time.NewTicker(restPause)
	defer look.Stop()
	for unserved := 0; unserved < 3; unserved++ {
		if redirect.IsLocked(p.config.Steering.Table) {
			unserved = -1
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// drained reports whether nothing is open any more, here and in the process before this one.
func (p *Proxy) drained() bool {
	if p.before != nil {
		select {
		case <-p.before.left:
		default:
			return false
		}
	}
	return p.stream.Stats().Open == 0 && p.datagram.Stats().Sessions.Load() == 0
}
