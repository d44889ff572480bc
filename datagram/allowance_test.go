package datagram

import (
	"cmp"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Whatever the arrival pattern, new sessions of a service take its share of the
// loop's time plus the saved budget.
func TestAllowanceIsKept(t *testing.T) {
	for _, c := range []struct{ every, cost, want time.Duration }{
		{time.Millisecond, 50 * time.Microsecond, 476 * time.Millisecond}, // all of them: one in 1.05 ms
		{20 * time.Microsecond, 50 * time.Microsecond, 1350 * time.Millisecond},
		{200 * time.Microsecond, 100 * time.Microsecond, 1350 * time.Millisecond},
		{0, time.Millisecond, 1350 * time.Millisecond},
	} {
		var a allowance
		var took int64
		for now, end := int64(time.Second), int64(11*time.Second); now < end; now += int64(c.every) {
			now += int64(c.cost)
			took += int64(c.cost)
			a.charge(now, int64(c.cost))
			now += a.pause()
		}
		if off := time.Duration(took) - c.want; off.Abs() > 10*time.Millisecond {
			t.Errorf("sessions of %v, asked for every %v, take %v of ten seconds, want %v", c.cost, c.every, time.Duration(took), c.want)
		}
	}
}

func TestOtherUsers(t *testing.T) {
	var c otherUsers
	one, two := new(serviceSessions), new(serviceSessions)
	at := func(ms int) int64 { return int64(time.Minute) + int64(ms)*int64(time.Millisecond) }
	for i, step := range []struct {
		ms   int
		by   *serviceSessions // which used the loop then
		want [2]bool
	}{
		{0, one, [2]bool{false, true}},
		{50, one, [2]bool{false, true}},
		{60, two, [2]bool{true, true}},
		{70, two, [2]bool{true, true}},
		{151, two, [2]bool{true, false}},
		{152, one, [2]bool{true, true}},
		{300, one, [2]bool{false, true}},
	} {
		c.note(step.by, at(step.ms))
		check.Equalf(t, [2]bool{c.has(one, at(step.ms)), c.has(two, at(step.ms))}, step.want, "step %d: otherUsers", i)
	}
}

// Between two turns of a service's clients, a flood of another service has one turn
// and begins one session in it.
func TestPromise8_FloodTakesTurns(t *testing.T) {
	const (
		flood = 90
		asked = 40
	)
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	for i, vip := range []string{vip4, "10.96.0.11"} {
		lab.Backends[i].EchoUDP(t, 5300)
		n.apply(svc([]string{"flooded", "quiet"}[i], vip, nil, at(lab.Backends[i].IPv4, 5300)))
	}
	// The loops pause until everything was sent; then each has other users.
	var still sync.WaitGroup
	gate := make(chan struct{})
	for _, w := range n.server.workers {
		still.Add(1)
		w.loop.Post(func() {
			still.Done()
			<-gate
			w.others.foreAt = w.loop.Now() + int64(time.Hour)
		})
	}
	still.Wait()
	send := func(vip string, number int) (list []net.Conn) {
		for range number {
			c := client(t, lab.Client, vip+":53")
			check.OK(t, must.Err(c.Write([]byte("q"))))
			list = append(list, c)
		}
		return list
	}
	before := delivered(t, lab.Node)
	send(vip4, flood)
	askers := send("10.96.0.11", asked)
	wait.True(t, "all datagrams have come", func() bool { return delivered(t, lab.Node) >= before+flood+asked })
	close(gate)
	for i, c := range askers {
		if got, err := ask(c, "again", patience); err != nil {
			t.Fatalf("client %d: %q, %v", i, got, err)
		}
	}
	n.stop()

	all := n.records.All()
	slices.SortFunc(all, func(a, b conntrack.Record) int { return cmp.Compare(a.ID, b.ID) })
	for loop := range loops {
		before, turn, quiet := 0, 0, 0
		for _, r := range all {
			switch {
			case int(r.ID)%loops != loop:
			case r.Port.Name.Name.Name == "flooded":
				turn++
			default:
				quiet++
				// The turns of a socket are longer until it detects the flood.
				if turn > leastBatch {
					t.Errorf("loop %d: %d sessions of the flood in one turn", loop, turn)
				}
				before, turn = before+turn, 0
			}
		}
		if before > quiet+leastBatch {
			t.Errorf("loop %d: %d sessions of the flood began before %d others had", loop, before, quiet)
		}
		t.Logf("loop %d: %d sessions of the flood began before %d others had, then %d", loop, before, quiet, turn)
	}
}

// Datagrams that arrive while a listening socket pauses, because its service began too
// many sessions, wait and are not lost.
func TestRestingLaneLosesNothing(t *testing.T) {
	const clients = 40
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	// The loops pause until everything was sent; then the service has begun too many. A
	// loop that has no turn for long after that has no reason to pause any more.
	round := func() {
		gate := make(chan struct{})
		for i, w := range n.server.workers {
			w.loop.Post(func() {
				<-gate
				now := poll.Nanotime()
				w.others.foreAt = now + int64(time.Hour)
				for _, p := range n.server.services {
					p.sessions[i].begin = allowance{left: -int64(20 * time.Millisecond), since: now}
				}
			})
		}
		var list []net.Conn
		for range clients {
			c := client(t, lab.Client, vip4+":53")
			check.OK(t, must.Err(c.Write([]byte("q"))))
			list = append(list, c)
		}
		close(gate)
		for i, c := range list {
			must.OK(t, c.SetReadDeadline(time.Now().Add(patience)))
			check.OKf(t, must.Err(c.Read(make([]byte, 100))), "client %d", i)
		}
	}
	wait.True(t, "a listening socket pauses", func() bool {
		round()
		return n.server.Stats().Pauses.Load() > 0
	})
	if s := n.server.Stats(); s.Lost.Load() != 0 {
		t.Errorf("stats %+v: want nothing lost", s)
	}
}

// Services that share a listening socket do not wait for one of them that has begun too many
// sessions.
func TestPromise8_FloodOnASharedListeningSocketStopsNoNeighbour(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *Options) { o.MaxListeners = 1 })
	lab.Backends[0].EchoUDP(t, 5300)
	vips := []string{vip4, "10.96.0.11", "10.96.0.12"}
	for i, vip := range vips { // the first has sockets of its own
		n.apply(svc([]string{"first", "flooded", "quiet"}[i], vip, nil, at(lab.Backends[0].IPv4, 5300)))
	}
	var set sync.WaitGroup
	for i, w := range n.server.workers {
		for name, p := range n.server.services {
			set.Add(1)
			w.loop.Post(func() {
				defer set.Done()
				w.others.foreAt = w.loop.Now() + int64(time.Hour)
				if name.Name.Name == "flooded" {
					p.sessions[i].begin = allowance{left: -int64(10 * time.Second), since: w.loop.Now()}
				}
			})
		}
	}
	set.Wait()
	for range 20 { // on both loops
		_, _ = ask(client(t, lab.Client, vips[1]+":53"), "flood", time.Millisecond)
	}
	for range 20 {
		if got, err := ask(client(t, lab.Client, vips[2]+":53"), "q", patience); err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
}
