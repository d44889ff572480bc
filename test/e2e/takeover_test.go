package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// takeOvers are the clients of a proxy whose place others take.
type takeOvers struct {
	lab     *netns.Lab
	p       *proxy // the one that serves
	targets []*target
	talkers []*talker
	pace    time.Duration // between two questions at a target
	again   atomic.Bool   // questions are asked again each second, as some may be lost
	stop    chan struct{}
	running sync.WaitGroup
}

// target is a destination to which new connections, or questions of new sockets, come all the
// time.
type target struct {
	network, address string
	served           atomic.Int64
}

// newTakeOvers starts a proxy, and clients that go on until finish.
func newTakeOvers(t *testing.T, m mode, flags ...string) *takeOvers {
	t.Helper()
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.EchoTCP(t, 8080)
		b.EchoUDP(t, 8080)
	}
	web, dns := webOn(lab), webOn(lab)
	web.nodePort = 30080
	dns.name, dns.vips, dns.nodePort, dns.protocol = "dns", []string{"10.96.0.53", "fd00:96::53"}, 30053, "UDP"
	p := prepareProxy(t, lab, []webService{web, dns})
	p.mode, p.relayed = m, "while the next process loads the BPF programs"
	p.mode.flags = slices.Concat(m.flags, []string{"--udp-timeout", "1s"}) // sessions end soon
	p.start(flags...)
	w := &takeOvers{lab: lab, p: p, pace: 8 * time.Millisecond, stop: make(chan struct{})}
	if slices.Contains(flags, "kernel") {
		w.pace = 2 * time.Millisecond // many wait for a decision at any time
	}
	for _, address := range web.destinations(lab) {
		w.targets = append(w.targets, &target{network: "tcp", address: address})
		w.talk(t, address)
	}
	for _, address := range dns.destinations(lab) {
		w.targets = append(w.targets, &target{network: "udp", address: address})
	}
	for _, g := range w.targets {
		w.running.Go(func() { w.ask(t, g) })
	}
	return w
}

// talk opens a connection that is used until the end.
func (w *takeOvers) talk(t *testing.T, address string) {
	t.Helper()
	c := must.Get(w.lab.Client.Dial("tcp", address))(t)
	t.Cleanup(func() { _ = c.Close() })
	k := &talker{conn: c, pause: 10 * time.Millisecond}
	w.talkers = append(w.talkers, k)
	w.running.Go(func() {
		check.OKf(t, k.run(w.stop), "%s to %s", c.LocalAddr(), address)
	})
}

// ask makes new connections, or asks by new sockets, until the end.
func (w *takeOvers) ask(t *testing.T, g *target) {
	for {
		select {
		case <-w.stop:
			return
		case <-time.After(w.pace):
		}
		if err := w.askOnce(g); err != nil {
			t.Errorf("%s %s, after %d that were served: %v", g.network, g.address, g.served.Load(), err)
			return
		}
		g.served.Add(1)
	}
}

func (w *takeOvers) askOnce(g *target) error {
	if g.network == "tcp" {
		_, err := w.lab.Client.Ask("tcp", g.address)
		return err
	}
	c, err := w.lab.Client.Dial("udp", g.address)
	if err != nil {
		return err
	}
	defer c.Close()
	if !w.again.Load() {
		return askByDatagram(c, startTimeout)
	}
	return wait.Poll(startTimeout, func() error { return askByDatagram(c, time.Second) })
}

// askByDatagram asks one question.
func askByDatagram(c net.Conn, within time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(within))
	if _, err := c.Write([]byte("who")); err != nil {
		return err
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err == nil && !strings.HasSuffix(string(b[:n]), "who") {
		err = fmt.Errorf("answer %q", b[:n])
	}
	return err
}

// progress waits until each client has been served again a few times.
func (w *takeOvers) progress(t *testing.T) {
	t.Helper()
	var at []int64
	count := func() (now []int64) {
		for _, g := range w.targets {
			now = append(now, g.served.Load())
		}
		for _, k := range w.talkers {
			now = append(now, int64(k.done.Load()))
		}
		return now
	}
	at = count()
	wait.For(t, "all clients go on", startTimeout, func() error {
		if t.Failed() {
			return nil
		}
		for i, n := range count() {
			if n < at[i]+5 {
				return fmt.Errorf("client %d was served %d times", i, n-at[i])
			}
		}
		return nil
	})
}

// next has another proxy take over.
func (w *takeOvers) next(t *testing.T, flags ...string) (before *proxy) {
	t.Helper()
	before = w.p
	next := *w.p
	w.p = &next
	w.p.start(append(flags, "--take-over")...)
	before.awaitLog("another sluice has taken over")
	return before
}

// end ends the clients.
func (w *takeOvers) end() {
	select {
	case <-w.stop:
	default:
		close(w.stop)
	}
	w.running.Wait()
	for _, k := range w.talkers {
		_ = k.conn.Close()
	}
}

// TestPromise7_TakeOverRefusesAndCutsNothing: processes take over from each other under
// clients that connect, ask and talk all the time. Each connection has one record, of whichever
// process saw its end.
func TestPromise7_TakeOverRefusesAndCutsNothing(t *testing.T) {
	t.Run("kernel", func(t *testing.T) { playTakeOvers(t, mode{}, "--datapath", "kernel") })
	t.Run("relay", func(t *testing.T) {
		forModes(t, func(t *testing.T, m mode) { playTakeOvers(t, m) })
	})
}

func playTakeOvers(t *testing.T, m mode, flags ...string) {
	takeOvers := 2
	if full() {
		takeOvers = 20
	}
	w := newTakeOvers(t, m, flags...)
	defer w.end()
	var before []*proxy
	for range takeOvers {
		w.progress(t)
		before = append(before, w.next(t, flags...))
		w.progress(t)
		before[len(before)-1].waitExit() // its connections are with the next one
	}
	w.progress(t)
	talked := make(map[netip.AddrPort]bool)
	for _, k := range w.talkers {
		talked[k.conn.LocalAddr().(*net.TCPAddr).AddrPort()] = true
	}
	w.end()
	for _, p := range before {
		check.Equalf(t, p.cmd.ProcessState.ExitCode(), 0, "exit status after a take-over")
	}
	connections := int64(len(w.talkers))
	for _, g := range w.targets {
		if g.network == "tcp" {
			connections += g.served.Load()
		}
	}
	var records []record
	ofTCP := func() error {
		all, err := readRecords(w.p.accessLog) // its last line may be half written
		records = slices.DeleteFunc(all, func(r record) bool { return r.Protocol != "TCP" })
		if n := len(records); err == nil && int64(n) < connections {
			err = fmt.Errorf("%d of %d", n, connections)
		}
		return err
	}
	wait.For(t, "all connections have a record", startTimeout, ofTCP)
	w.p.stop()
	check.OK(t, ofTCP())
	check.Equalf(t, int64(len(records)), connections, "%d records of TCP connections", len(records))
	for _, r := range records {
		delete(talked, r.Client)
		if r.End != "client_fin" {
			t.Errorf("a connection ended with %q: %+v", r.End, r)
		}
	}
	if len(talked) > 0 {
		t.Errorf("%d connections that outlived take-overs have no record", len(talked))
	}
}

// TestTakeOverIsAsked: without --take-over, a second process is an error that names the flag.
func TestTakeOverIsAsked(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p := startProxy(t, lab, nil)
	second := *p
	second.launch()
	second.waitExit()
	if code := second.cmd.ProcessState.ExitCode(); code != 1 || !second.stderr.Contains("take its place with --take-over") {
		t.Errorf("%v: %s", second.cmd.ProcessState, second.stderr)
	}
	third := *p
	third.mode.flags = []string{"--take-over"}
	p.stop()
	third.start() // there is nobody to take over from
	third.stop()
}

// TestTakeOverGivenUp: a process that ends before it serves leaves everything to the running
// one, however far it came, except for answers to the UDP sessions that it has taken.
func TestTakeOverGivenUp(t *testing.T) {
	w := newTakeOvers(t, modes[1])
	w.again.Store(true)
	defer w.end() // before the last proxy is killed
	hello := handover.Message{Step: handover.StepHello, Hello: &handover.Hello{
		Version: handover.Version, Least: handover.Least, Program: "test", Mode: "tproxy/nftables", Moves: true,
	}}
	steps := []func(*handover.Conn) error{
		func(c *handover.Conn) error { return c.Send(&hello) },
		func(c *handover.Conn) error { return take(c, handover.StepWelcome) },
		func(c *handover.Conn) error { return c.Send(&handover.Message{Step: handover.StepAsk}) },
		func(c *handover.Conn) error { return take(c, "") },
		func(c *handover.Conn) error { return c.Send(&handover.Message{Step: handover.StepServing}) },
		func(c *handover.Conn) error {
			_, err := c.AwaitStates(handover.StepLeaving, startTimeout)
			return err
		},
		func(c *handover.Conn) error {
			_, _ = c.TakeFirst(func(m *handover.Moved) handover.Taken {
				_ = c.Close() // later, the running one may already have left
				return dropped(m.FDs)
			})
			return nil
		},
	}
	for n := range len(steps) + 1 {
		w.progress(t)
		err := w.lab.Node.Do(func() error {
			c, err := handover.Dial("sluice")
			if err != nil {
				return err
			}
			defer c.Close()
			for _, step := range steps[:n] {
				if err := step(c); err != nil {
					return err
				}
			}
			return nil
		})
		must.OKf(t, err, "%d steps", n)
	}
	w.again.Store(false)
	w.progress(t)
	if w.p.stderr.Contains("another sluice has taken over") {
		t.Error("the running sluice has left")
	}
	w.next(t)
	w.progress(t)
}

// dropped are the descriptors of a session whose process dies at once.
type dropped []int

func (d dropped) Begin() { d.Discard() }

func (d dropped) Discard() {
	for _, fd := range d {
		_ = unix.Close(fd)
	}
}

// take takes the sockets that follow a message, if there is one, and closes them.
func take(c *handover.Conn, after handover.Step) error {
	if after != "" {
		if _, err := c.Await(after, startTimeout); err != nil {
			return err
		}
	}
	sockets, _, err := c.Take()
	sockets.Close()
	return err
}

// otherVersions are those of processes whose messages do not fit ours.
var otherVersions = []handover.Hello{
	{Version: handover.Version + 2, Least: handover.Version + 1, Program: "later"},
	{Version: handover.Least - 1, Least: 1, Program: "earlier"},
}

// TestTakeOverByAnotherVersion: a process whose messages do not fit is refused, and the running
// one serves on.
func TestTakeOverByAnotherVersion(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	for _, h := range otherVersions {
		err := lab.Node.Do(func() error {
			c, err := handover.Dial("sluice")
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.Send(&handover.Message{Step: handover.StepHello, Hello: &h}); err != nil {
				return err
			}
			_, err = c.Await(handover.StepWelcome, startTimeout)
			return err
		})
		var refused *handover.RefusedError
		if !errors.As(err, &refused) || refused.Switch {
			t.Errorf("%s: %v, want a refusal", h.Program, err)
		}
		check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	}
	p.stop()
}

// TestTakeOverFromAnotherVersion: a process ends, and changes nothing, if the running one does not
// understand its messages.
func TestTakeOverFromAnotherVersion(t *testing.T) {
	for _, running := range otherVersions {
		t.Run(running.Program, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Settle(t)
			before := lab.Node.Dump(t)
			p := prepareProxy(t, lab, []webService{webOn(lab)})
			fits := make(chan bool, 1)
			err := lab.Node.Do(func() error {
				lock, err := redirect.AcquireLock("sluice")
				if err != nil {
					return err
				}
				t.Cleanup(func() { _ = lock.Release() })
				offer, err := handover.Listen("sluice", func() (r handover.Running) { return r })
				if err != nil {
					return err
				}
				t.Cleanup(offer.Close)
				go func() {
					defer close(fits)
					c, err := offer.Accept()
					if err != nil {
						return
					}
					defer c.Close()
					if m, err := c.Await(handover.StepHello, startTimeout); err == nil {
						fits <- m.Hello.Version >= running.Least && m.Hello.Least <= running.Version
						_ = c.Send(&handover.Message{Step: handover.StepRefuse, Why: "the versions differ"})
					}
				}()
				return nil
			})
			must.OK(t, err)
			p.launch("--take-over")
			p.waitExit()
			if code := p.cmd.ProcessState.ExitCode(); code != 1 || !p.stderr.Contains("the running sluice serves on: the versions differ") {
				t.Errorf("%v: %s", p.cmd.ProcessState, p.stderr)
			}
			if fits, said := <-fits; !said || fits {
				t.Error("it says that it understands the running one")
			}
			if after := lab.Node.Dump(t); after != before {
				t.Errorf("it has changed the node:\n%s", cmp.Diff(before, after))
			}
		})
	}
}

// staying opens connections that do not move to the next process: it does not know their Service,
// which is deleted. flags are the running process's.
func staying(t *testing.T, lab *netns.Lab, n int, flags ...string) (*proxy, []net.Conn) {
	t.Helper()
	lab.Backends[0].EchoTCP(t, 8080)
	gone := webOn(lab)
	gone.name, gone.vips = "gone", []string{"10.96.0.99"}
	p := prepareProxy(t, lab, []webService{webOn(lab), gone})
	p.start(flags...)
	list := hold(t, lab.Client, addresses(80, gone.vips...)[0], n)
	p.removeAndWait("gone", 1)
	return p, list
}

// removeAndWait removes a Service, and waits until only so many service ports are served.
func (p *proxy) removeAndWait(name string, left float64) {
	p.t.Helper()
	p.remove(name)
	wait.For(p.t, "the Service is gone", startTimeout, func() error {
		values, err := p.metrics()
		if err == nil && values["sluice_service_ports"] != left {
			err = fmt.Errorf("%v service ports", values["sluice_service_ports"])
		}
		return err
	})
}

// TestTakeOverTimeout: what stays with the process before is reset when the time is over, and has
// its record, which the next process shows, too.
func TestTakeOverTimeout(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p, held := staying(t, lab, 3, "--take-over-timeout", "100ms")
	next := *p
	next.start("--take-over")
	for _, c := range held {
		if err := ended(c); !isReset(err) {
			t.Errorf("%s ended with %v, want a reset", c.LocalAddr(), err)
		}
	}
	p.waitExit()
	wait.For(t, "the records of connections that were cut", startTimeout, func() error {
		records, err := readRecords(p.accessLog)
		n := 0
		for _, r := range records {
			if r.End == "shutdown" {
				n++
			}
		}
		if err == nil && n != len(held) {
			err = fmt.Errorf("%d, want %d", n, len(held))
		}
		return err
	})
	wait.For(t, "the next process shows them among the past", startTimeout, func() error {
		out, err := sluice(t, lab, "log", "-o", "json", "end=shutdown")
		if n := strings.Count(out, `"end":"shutdown"`); err == nil && n != len(held) {
			err = fmt.Errorf("%d, want %d: %s", n, len(held), out)
		}
		return err
	})
	check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	next.stop()
}

// TestTakeOverInAnotherMode: a process that steers otherwise begins once the running one has
// ended.
func TestTakeOverInAnotherMode(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startMode(t, lab, modes[0], []webService{webOn(lab)})
	next := *p
	next.mode = modes[1]
	next.start("--take-over")
	p.waitExit()
	check.Equalf(t, p.cmd.ProcessState.ExitCode(), 0, "exit status")
	check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	next.stop()
}

// TestTakeOverFromAnotherProxy: a sluice for other Services does not take this one's place, nor
// end it.
func TestTakeOverFromAnotherProxy(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	next := *p
	next.launch("--take-over", "--service-proxy-name", "other")
	next.waitExit()
	if code := next.cmd.ProcessState.ExitCode(); code != 1 || !next.stderr.Contains("the running sluice serves the Services of --service-proxy-name=") {
		t.Errorf("%v: %s", next.cmd.ProcessState, next.stderr)
	}
	check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	p.stop()
}

// TestNextSteersAsTheRunningOne: a process that may choose takes the running one's mode, though it
// would choose another one, and cuts nothing.
func TestNextSteersAsTheRunningOne(t *testing.T) {
	for _, m := range modes[1:] {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := startMode(t, lab, m, []webService{webOn(lab)})
			c, err := lab.Client.Dial("tcp", addresses(80, vip4)[0])
			must.OK(t, err)
			defer c.Close()
			must.OK(t, must.Err(netns.AskOn(c)))
			next := *p
			next.mode.flags = nil
			next.start("--take-over")
			p.awaitLog("another sluice has taken over")
			if !next.stderr.Contains(", as the running sluice does") {
				t.Error("the log does not say why it steers so")
			}
			_ = c.SetDeadline(time.Now().Add(startTimeout))
			_, err = fmt.Fprintln(c, "again")
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, len("again\n")))
			}
			check.OK(t, err)
			next.stop()
		})
	}
}

// TestTakeOverWithoutFlows: a process that leaves nothing to the kernel does not take over
// from one with kernel flows, whose programs nobody would tell of Services. It begins once that
// one has ended.
func TestTakeOverWithoutFlows(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.start("--datapath", "kernel")
	next := *p
	next.start("--datapath", "relay", "--take-over")
	p.waitExit()
	if !p.stderr.Contains("a sluice that steers otherwise begins") {
		t.Error("it has handed over")
	}
	check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	next.stop()
}

// TestPromise7_ForwardedConnectionsOutliveALesserProcess: a process that lacks a right for kernel flows does
// not take over from one that has them, whose connections go on.
func TestPromise7_ForwardedConnectionsOutliveALesserProcess(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.start("--datapath", "kernel")
	target := addresses(80, vip4)[0]
	c := must.Get(lab.Client.Dial("tcp", target))(t)
	defer c.Close()
	must.OK(t, must.Err(netns.AskOn(c)))
	lesser := *p
	lesser.under = with(slices.DeleteFunc(granted(t, deployments[0].file, deployments[0].list), func(name string) bool { return name == "perfmon" }))
	for _, path := range []string{"auto", "kernel"} {
		next := lesser
		next.launch("--datapath", path, "--take-over")
		next.waitExit()
		if code := next.cmd.ProcessState.ExitCode(); code != 1 || !next.stderr.Contains("has kernel flows and serves on: this one cannot have them: CAP_PERFMON is missing") {
			t.Errorf("--datapath %s: %v: %s", path, next.cmd.ProcessState, next.stderr)
		}
		check.OKf(t, echoes(c), "a forwarded connection")
		check.OK(t, must.Err(lab.Client.Ask("tcp", target)))
	}
	_ = c.Close()
	for _, r := range p.awaitRecords(3) {
		if r.Path != "kernel" || r.End != "client_fin" {
			t.Errorf("a connection's path is %s, its end %s", r.Path, r.End)
		}
	}
	next := lesser
	next.start("--datapath", "relay", "--take-over") // asked for: it begins when the other one has ended
	p.waitExit()
	check.OK(t, must.Err(lab.Client.Ask("tcp", target)))
	next.stop()
}

// TestTakeOverOfHealthCheckPorts: the port of a Service's health checks never refuses.
func TestTakeOverOfHealthCheckPorts(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p := prepareProxy(t, lab, nil)
	p.write("checked.yaml", checkedService(32000, true))
	p.start()
	asks := addresses(32000, lab.Node.IPv4.String(), lab.Node.IPv6.String())
	stop := make(chan struct{})
	var running sync.WaitGroup
	for _, address := range asks {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
				c, err := lab.Client.Dial("tcp", address)
				if err != nil {
					t.Errorf("a health check: %v", err)
					return
				}
				_ = c.Close()
			}
		})
	}
	for range 3 {
		next := *p
		next.start("--take-over")
		p.waitExit()
		p = &next
	}
	close(stop)
	running.Wait()
	for _, address := range asks {
		if status, _, body, err := checkHealth(lab, address, "/any"); err != nil || status != 200 {
			t.Errorf("%s: %d %s, %v", address, status, body, err)
		}
	}
	p.stop()
}

// TestHangupAfterTakeOver: the process that serves its open connections still reopens the access
// log, and writes records of connections that last.
func TestHangupAfterTakeOver(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p, held := staying(t, lab, 1, "--access-log-interval", "1s")
	next := *p
	next.start("--take-over")
	p.awaitLog("another sluice has taken over")
	rotated := p.accessLog + ".1"
	must.OK(t, os.Rename(p.accessLog, rotated))
	p.signal(syscall.SIGHUP)
	wait.For(t, "a record of the connection that lasts, in the new file", startTimeout, func() error {
		text, err := os.ReadFile(p.accessLog)
		if err == nil && !strings.Contains(string(text), held[0].LocalAddr().String()) {
			err = errNotYet
		}
		return err
	})
	_ = held[0].Close()
	p.waitExit()
	next.stop()
}
