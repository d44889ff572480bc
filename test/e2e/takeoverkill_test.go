package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// takeOverKills are rounds of a take-over in which a process is killed, at a random moment.
type takeOverKills struct {
	lab     *netns.Lab
	p       *proxy // the one that serves
	address string
	whole   time.Duration // how long a take-over takes, with all connections
}

// TestTakeOverKilled: a process is killed at random moments of a take-over, and a supervisor starts
// it again. Connections that the killed one does not have go on. The others are reset, and none
// waits for nothing. The node serves new connections within a second.
func TestTakeOverKilled(t *testing.T) {
	for _, victim := range []string{"next", "running"} {
		t.Run(victim, func(t *testing.T) {
			rounds, held := 4, 40
			if full() {
				rounds, held = 20, 400
			}
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			k := &takeOverKills{lab: lab, p: prepareProxy(t, lab, []webService{webOn(lab)}), address: addresses(80, vip4)[0]}
			k.p.start("--datapath", "relay")
			list := hold(t, lab.Client, k.address, held)
			start, before := time.Now(), k.p
			k.p = k.launch()
			before.waitExit()
			k.whole = time.Since(start)
			for _, c := range list {
				_ = c.Close()
			}
			for range rounds {
				k.round(t, victim == "next", held)
			}
			k.p.stop()
		})
	}
}

// launch begins a take-over.
func (k *takeOverKills) launch() *proxy {
	next := *k.p
	next.ends = nil
	next.launch("--datapath", "relay", "--take-over")
	return &next
}

func (k *takeOverKills) round(t *testing.T, killsNext bool, held int) {
	t.Helper()
	talks := make([]*echoing, held)
	stop := make(chan struct{})
	var running sync.WaitGroup
	end := sync.OnceFunc(func() {
		close(stop)
		running.Wait()
	})
	defer end()
	for i, c := range hold(t, k.lab.Client, k.address, held) {
		talks[i] = &echoing{conn: c}
		running.Go(func() { talks[i].run(stop) })
	}
	before, next := k.p, k.launch()
	moment := time.Duration(rand.Int64N(int64(k.whole)))
	time.Sleep(moment)
	victim := next
	if !killsNext {
		victim = before
	}
	_ = victim.cmd.Process.Kill() // it may have ended
	killed := time.Now()
	victim.waitExit()
	if k.p = next; killsNext {
		k.p = k.launch() // as a supervisor does
	}
	for err := errNotYet; err != nil; {
		if time.Since(killed) > startTimeout {
			t.Fatal(err)
		}
		var c net.Conn
		if c, err = k.lab.Client.Dialer(&net.Dialer{Timeout: 100 * time.Millisecond}, "tcp", k.address); err == nil {
			_, err = netns.AskOn(c)
			_ = c.Close()
		}
	}
	away := time.Since(killed)
	if full() && away > time.Second {
		t.Errorf("new connections are served %v after the kill", away)
	}
	k.p.awaitLog(`"message":"ready"`)
	var from []int64
	for _, e := range talks {
		from = append(from, e.done.Load())
	}
	lost := 0
	wait.For(t, "connections go on, but for those of the killed process", startTimeout, func() error {
		lost = 0
		for i, e := range talks {
			if e.lost.Load() {
				lost++
			} else if e.done.Load() < from[i]+3 {
				return fmt.Errorf("%s does not go on", e.conn.LocalAddr())
			}
		}
		if with := movedBy(before, next); killsNext && lost > with || !killsNext && lost > held-with {
			return fmt.Errorf("%d of %d are lost, and the next process has had %d", lost, held, with)
		}
		return nil
	})
	end()
	for _, e := range talks {
		if e.err != nil && !isReset(e.err) {
			t.Errorf("%s was not reset: %v", e.conn.LocalAddr(), e.err)
		}
	}
	t.Logf("killed after %v: %d of %d connections were lost; new ones were served after %v", moment, lost, held, away)
	before.waitExit() // it has no connection any more
}

// echoing is a connection that is used until stop or its end.
type echoing struct {
	conn net.Conn
	done atomic.Int64
	lost atomic.Bool
	err  error
}

func (e *echoing) run(stop <-chan struct{}) {
	defer e.conn.Close()
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(rand.Int64N(int64(10 * time.Millisecond)))):
		}
		if e.err = echoes(e.conn); e.err != nil {
			e.lost.Store(true)
			return
		}
		e.done.Add(1)
	}
}

var (
	given = regexp.MustCompile(`"connections":(\d+),"took":.*"the next sluice has taken over connections"`)
	taken = regexp.MustCompile(`"connections_moved":(\d+)`)
)

// movedBy returns how many connections have moved, as far as one of both processes has said.
func movedBy(before, next *proxy) int {
	most := 0
	for text, what := range map[string]*regexp.Regexp{before.stderr.String(): given, next.stderr.String(): taken} {
		sum := 0
		for _, m := range what.FindAllStringSubmatch(text, -1) {
			n, _ := strconv.Atoi(m[1])
			sum += n
		}
		most = max(most, sum)
	}
	return most
}

// TestTakeOverAtTheLimitOfOpenFiles: the next process takes what its limit of open files allows.
// The other connections stay where they are and go on, and new ones are served.
func TestTakeOverAtTheLimitOfOpenFiles(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "relay")
	address := addresses(80, vip4)[0]
	held := hold(t, lab.Client, address, 400) // two sockets each
	next := *p
	next.files = 800
	next.start("--datapath", "relay", "--take-over")
	p.awaitLog("the next sluice has taken over connections")
	alive(t, held)
	check.OK(t, must.Err(lab.Client.Ask("tcp", address)))
	if n := movedBy(p, &next); n == 0 || n == len(held) {
		t.Errorf("%d of %d connections have moved", n, len(held))
	}
	for _, c := range held {
		_ = c.Close()
	}
	p.waitExit()
	next.stop()
	if records := p.records(); len(records) != len(held)+1 {
		t.Errorf("%d records of %d connections", len(records), len(held)+1)
	}
}

// TestTakeOverFromAStalledProcess: a process that stands still gives nothing and loses nothing.
// The next one gives up.
func TestTakeOverFromAStalledProcess(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "relay")
	held := hold(t, lab.Client, addresses(80, vip4)[0], 10)
	p.signal(syscall.SIGSTOP)
	next := *p
	next.launch("--datapath", "relay", "--take-over")
	next.waitExit()
	if code := next.cmd.ProcessState.ExitCode(); code != 1 || !next.stderr.Contains("ask for a take-over") {
		t.Errorf("%v: %s", next.cmd.ProcessState, next.stderr)
	}
	p.signal(syscall.SIGCONT)
	alive(t, held)
	check.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	third := *p
	third.start("--datapath", "relay", "--take-over")
	p.waitExit()
	alive(t, held)
	third.stop()
}

// TestTwoTakeOversAtOnce: of two processes that begin at once, one takes over from the running one, and
// the other one from that.
func TestTwoTakeOversAtOnce(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "relay")
	address := addresses(80, vip4)[0]
	held := hold(t, lab.Client, address, 10)
	var both [2]proxy
	for i := range both {
		both[i] = *p
		both[i].launch("--datapath", "relay", "--take-over")
	}
	p.waitExit()
	var first, last *proxy
	wait.For(t, "one takes over from the other", startTimeout, func() error {
		for i := range both {
			if both[i].stderr.Contains("another sluice has taken over") {
				first, last = &both[i], &both[1-i]
				return nil
			}
		}
		return errNotYet
	})
	first.waitExit()
	last.awaitReady()
	for _, before := range []*proxy{p, first} {
		check.Equalf(t, before.cmd.ProcessState.ExitCode(), 0, "exit status after a take-over")
	}
	alive(t, held)
	check.OK(t, must.Err(lab.Client.Ask("tcp", address)))
	for _, c := range held {
		_ = c.Close()
	}
	last.awaitRecords(len(held) + 1)
	last.stop()
}
