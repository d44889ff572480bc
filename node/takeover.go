package node

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/redirect"
)

// predecessor is the running process whose place this one takes.
type predecessor struct {
	conn    *handover.Conn
	serving bool              // this process serves new connections
	sockets *handover.Sockets // listening sockets that nobody here has taken
	clients []netip.Addr      // addresses that sockets of its connections have
	moved   chan struct{}     // has a value when its connections have moved here
	left    chan struct{}     // closed when it has ended

	sessions int // UDP sessions that have moved here
}

// hasMoved returns the channel that receives when connections have moved here. b may be nil.
func (b *predecessor) hasMoved() <-chan struct{} {
	if b == nil {
		return nil
	}
	return b.moved
}

// takesOver reports whether the process before still serves new connections.
func (p *Proxy) takesOver() bool { return p.before != nil && !p.before.serving }

// lockPause is the time between two looks at the lock of a process that begins or ends.
const lockPause = 10 * time.Millisecond

// lockName is that of the lock's socket in a take-over.
const lockName = "lock"

// begin takes the lock, or connects to the process that has it and hands over. A process that
// begins or ends just now has the lock, and offers nothing.
func (p *Proxy) begin() (err error) {
	o := &p.config
	for began := time.Now(); ; time.Sleep(lockPause) {
		p.lock, err = redirect.AcquireLock(o.Steering.Table)
		var locked *redirect.LockedError
		if !errors.As(err, &locked) {
			return err
		}
		if !o.TakeOver {
			return fmt.Errorf("another sluice serves this node: %w; take its place with --take-over, stop it first, or give this one a network namespace of its own", err)
		}
		conn, err := handover.Dial(o.Steering.Table)
		if err == nil {
			p.before = &predecessor{conn: conn, moved: make(chan struct{}, 1), left: make(chan struct{})}
			p.config.Steering.Beside = true
			return nil
		}
		_, isStranger := errors.AsType[*handover.StrangerError](err)
		_, isRefused := errors.AsType[*handover.RefusedError](err)
		if isStranger || isRefused || time.Since(began) > stopPatience {
			return fmt.Errorf("another sluice serves this node: %w; --take-over: %w", locked, err)
		}
	}
}

// greet asks the running process to hand over. If that process steers otherwise, it ends instead,
// and again is true: this one then starts as after any other process.
func (p *Proxy) greet() (again bool, err error) {
	conn := p.before.conn
	hello := handover.Hello{
		Version: handover.Version, Least: handover.Least, Program: p.config.Version,
		Mode: p.steer.Traits().Name, Numbers: p.numbers(), Proxy: p.config.Store.ServiceProxyName, Moves: true,
		Relays: p.config.relaysAll(),
	}
	if err := conn.Send(&handover.Message{Step: handover.StepHello, Hello: &hello}); err != nil {
		return false, err
	}
	_, err = conn.Await(handover.StepWelcome, handover.Patience)
	var refused *handover.RefusedError
	switch {
	case errors.As(err, &refused) && refused.Switch:
		p.log.Warn().Str("because", refused.Why).Str("choice", p.steerChoice).Msg("the running sluice ends before this one begins: its connections are cut")
		return true, p.replace()
	case err != nil:
		return false, fmt.Errorf("the running sluice serves on: %w", err)
	}
	sockets, _, err := conn.Take()
	if err != nil {
		return false, err
	}
	defer sockets.Close()
	lock, ok := sockets.TakeOne(lockName)
	if !ok {
		return false, errors.New("the running sluice has not given its lock")
	}
	if p.lock, err = redirect.InheritLock(lock.FD); err != nil {
		return false, err
	}
	p.ports.inherit(sockets)
	return false, nil
}

// numbers describes the marks, routing tables and reply ports of the steering.
func (p *Proxy) numbers() string {
	s, replies, ports := &p.config.Steering, p.steer.Traits().Replies, "off"
	if replies.Diverted {
		ports = fmt.Sprintf("%d-%d", replies.FirstPort, replies.LastPort)
	}
	r := s.Routes.WithDefaults()
	return fmt.Sprintf("marks %#x, %#x and %#x, routing tables %d and %d, reply ports %s", r.SteerMark, r.ReplyMark, s.SocketMark, r.SteerTable, r.ReplyTable, ports)
}

// replace stops the running process, and takes the lock.
func (p *Proxy) replace() error {
	conn := p.before.conn
	defer conn.Close()
	if err := conn.Send(&handover.Message{Step: handover.StepStop}); err != nil {
		return err
	}
	if _, err := conn.Receive(2*stopPatience + flowsPatience); !handover.Gone(err) {
		return fmt.Errorf("the running sluice does not end: %w", err)
	}
	return p.beginAlone()
}

// beginAlone takes the lock of a process that has ended, or is about to.
func (p *Proxy) beginAlone() (err error) {
	p.before, p.config.Steering.Beside = nil, false
	for began := time.Now(); ; time.Sleep(lockPause) { // the kernel closes its descriptors one by one
		p.lock, err = redirect.AcquireLock(p.config.Steering.Table)
		if err == nil || time.Since(began) > stopPatience {
			return err
		}
	}
}

// takeSockets asks for what serves new connections, once the configuration is known. From
// then on the running process changes nothing.
func (p *Proxy) takeSockets() error {
	b := p.before
	err := b.conn.Send(&handover.Message{Step: handover.StepAsk})
	if err == nil {
		b.sockets, b.clients, err = b.conn.Take()
	}
	if err != nil {
		if !p.isAlone() {
			return err
		}
		b.sockets = &handover.Sockets{}
	}
	if clients := p.steer.Traits().Replies.Clients; clients == nil {
		b.clients = nil
	} else if err := clients.Expect(b.clients); err != nil {
		return err
	}
	p.stream.Inherit(b.sockets)
	p.datagram.Inherit(b.sockets)
	return nil
}

// isAlone reports whether the running process has ended before it could hand over: then this
// one serves as after a crash. The kernel closes descriptors of a process that ends one by one.
func (p *Proxy) isAlone() bool {
	for began := time.Now(); handover.IsOffered(p.config.Steering.Table); time.Sleep(lockPause) {
		if time.Since(began) > stopPatience {
			return false
		}
	}
	return true
}

// tookOver reports to the running process that this one serves, and waits until it has closed
// what only one process can have.
func (p *Proxy) tookOver() error {
	b := p.before
	p.learn(b.sockets.States)
	p.stream.Begin()
	unused := b.sockets.Close()
	if err := p.lock.Own(); err != nil {
		return err
	}
	err := b.conn.Send(&handover.Message{Step: handover.StepServing})
	if err == nil {
		var states []handover.State
		states, err = b.conn.AwaitStates(handover.StepLeaving, handover.Patience)
		p.learn(states)
	}
	if err != nil && !p.isAlone() {
		return err
	}
	b.serving = true
	if err == nil {
		b.sessions, err = b.conn.TakeFirst(p.datagram.Take)
		var stayed *handover.StayedError
		if errors.As(err, &stayed) {
			p.log.Warn().Err(err).Msg("UDP sessions stay with the sluice before")
			err = nil
		}
	}
	p.datagram.Begin()
	if err == nil {
		var states []handover.State
		states, err = b.conn.AwaitStates(handover.StepLeft, handover.Patience)
		p.learn(states)
	}
	if err != nil {
		p.log.Warn().Err(err).Msg("the sluice before has ended without handing over everything")
	} else {
		p.log.Info().Strs("sockets_unused", unused).Int("udp_sessions_moved", b.sessions).Msg("took over from the running sluice")
	}
	p.loadDrains() // until now, the sluice before took commands
	go p.outlive()
	if err := p.openRest(); err != nil {
		p.log.Error().Err(err).Msg("not everything is served after the take-over")
	}
	p.serveRest()
	p.health.Update(p.table) // takes inherited sockets; the rest is closed
	p.ports.serve()
	return nil
}

// outlive takes the connections of the process before, waits for its end, and releases what its
// other connections needed.
func (p *Proxy) outlive() {
	b := p.before
	moved := 0
	for {
		n, err := b.conn.TakeMoved(p.stream.Take, p.learnPast)
		if moved += n; n > 0 {
			select {
			case b.moved <- struct{}{}:
			default: // Run knows
			}
		}
		var stayed *handover.StayedError
		if errors.As(err, &stayed) {
			p.log.Warn().Err(err).Msg("connections stay with the sluice before")
		} else if err != nil {
			break
		}
	}
	_ = b.conn.Close()
	if clients := p.steer.Traits().Replies.Clients; clients != nil {
		for _, addr := range b.clients {
			clients.Release(addr)
		}
	}
	p.log.Info().Int("connections_moved", moved).Msg("the sluice before has ended")
	close(b.left)
}

// leave stops accepting and steering: another process does both. Open connections go on.
func (p *Proxy) leave() {
	p.left = true
	p.stream.Leave()
	p.datagram.Leave()
	p.steer.Leave()
}
