package mode

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// fakeMode is a mode that only knows whether replies come back.
type fakeMode struct {
	Core
	replies atomic.Bool // come back in the "kernel"
	puts    int
	fails   error
}

func newFakeMode(t *testing.T) *fakeMode {
	t.Helper()
	m := new(fakeMode)
	m.Demand = NewDemand(&m.Core, redirect.Replies{FirstPort: 10, LastPort: 20}, m.put)
	err := m.Open(Steps{
		Apply:  func(p redirect.Plan, _ *redirect.Changes) error { return m.put(p) },
		Verify: func() (bool, error) { return false, nil },
	}, nil, watch.Options{})
	must.OK(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}

func (m *fakeMode) put(p redirect.Plan) error {
	m.puts++
	if m.fails != nil {
		return m.fails
	}
	m.replies.Store(!p.NodeSourceOnly)
	m.Set(p)
	return nil
}

func (m *fakeMode) apply(t *testing.T, p redirect.Plan) {
	t.Helper()
	must.OK(t, m.Apply(p))
}

func (m *fakeMode) verify(t *testing.T) {
	t.Helper()
	must.OK(t, must.Err(m.Verify()))
}

func (m *fakeMode) want(t *testing.T, when string, replies bool) {
	t.Helper()
	if m.replies.Load() != replies {
		t.Errorf("%s: replies come back: %v, want %v", when, !replies, replies)
	}
}

var client = netip.MustParseAddr("10.1.0.1")

func TestDemandFollowsSockets(t *testing.T) {
	m := newFakeMode(t)
	if _, err := m.Demand.Hold(client); err == nil {
		t.Error("a socket is held before the first plan")
	}
	m.apply(t, redirect.Plan{})
	m.want(t, "without a socket", false)
	for range 2 {
		must.Equalf(t, must.Get(m.Demand.Hold(client))(t), [2]uint16{10, 20}, "hold")
	}
	m.want(t, "with two", true)
	check.Equalf(t, m.puts, 2, "changes of the kernel: that of Apply and one for the first socket")
	m.apply(t, redirect.Plan{})
	m.want(t, "with two, after another plan", true)
	m.Demand.Release(client)
	m.Demand.Release(client)
	m.verify(t)
	m.verify(t)
	m.want(t, "soon after the last one", true)
	m.Demand.linger = 0
	must.OK(t, must.Err(m.Demand.Hold(client)))
	m.verify(t)
	m.want(t, "with one again", true)
	m.Demand.Release(client)
	m.verify(t)
	m.want(t, "after one that was open since the last look", true)
	m.verify(t)
	m.want(t, "at the next look", false)
	m.apply(t, redirect.Plan{})
	m.want(t, "after another plan", false)
	must.OK(t, must.Err(m.Demand.Hold(client)))
	m.want(t, "with one again", true)
	m.apply(t, redirect.Plan{NodeSourceOnly: true})
	m.want(t, "in a plan without clients' addresses", false)
}

// The next process brings replies back from its first plan on, for the sockets of the process
// before, whose mode leaves the kernel as it is.
func TestDemandOfTheProcessBefore(t *testing.T) {
	before := newFakeMode(t)
	before.apply(t, redirect.Plan{})
	check.Equalf(t, len(before.Demand.Held()), 0, "addresses without a socket")
	must.OK(t, must.Err(before.Demand.Hold(client)))
	held := before.Demand.Held()
	check.Equalf(t, len(held), 1, "addresses with a socket")
	before.Leave()
	before.want(t, "after the first process has left", true)
	check.ErrorIsf(t, before.Apply(redirect.Plan{}), ErrClosed, "apply after that")

	next := newFakeMode(t)
	must.OK(t, next.Demand.Expect(held))
	next.apply(t, redirect.Plan{})
	next.want(t, "with the first plan", true)
	next.Demand.linger = 0
	next.verify(t)
	next.want(t, "while the process before has its socket", true)
	next.Demand.Release(held[0])
	next.verify(t)
	next.verify(t)
	next.want(t, "once that is closed", false)
	idle := newFakeMode(t)
	must.OK(t, idle.Demand.Expect(nil))
	idle.apply(t, redirect.Plan{})
	idle.want(t, "after a process without sockets", false)
}

// Where the kernel refuses, each connection fails at once: only Verify tries again, and
// says why.
func TestDemandTriesAgainInVerify(t *testing.T) {
	m := newFakeMode(t)
	m.apply(t, redirect.Plan{})
	m.fails = errors.New("a rule of somebody else's")
	for range 3 {
		check.ErrorIsf(t, must.Err(m.Demand.Hold(client)), m.fails, "hold")
	}
	check.Equalf(t, m.puts, 2, "changes that were tried: that of Apply and one more")
	check.ErrorIsf(t, must.Err(m.Verify()), m.fails, "verify")
	m.fails = nil
	m.verify(t)
	check.OK(t, must.Err(m.Demand.Hold(client)))
	m.want(t, "once the kernel takes it", true)
	_ = m.Close()
	m.Demand.ready.Store(false)
	check.ErrorIsf(t, must.Err(m.Demand.Hold(client)), ErrClosed, "hold after the end")
}

// A socket never waits for a reply that does not come back, however its Hold and the
// Verify that ends the demand meet.
func TestDemandEndsForNoOpenSocket(t *testing.T) {
	m := newFakeMode(t)
	m.apply(t, redirect.Plan{})
	m.Demand.linger = 0
	must.OK(t, must.Err(m.Demand.Hold(client)))
	m.verify(t)
	m.want(t, "with a socket that came before Verify", true)
	m.Demand.Release(client)
	// How often the Verify comes first is up to the scheduler.
	const rounds = 2000
	began := time.Now()
	for n := 0; n < rounds || m.puts < rounds/2; n++ {
		if time.Since(began) > wait.Patience {
			t.Fatalf("the kernel was changed %d times in %d rounds: replies hardly ever ended", m.puts, n)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			check.OK(t, must.Err(m.Demand.Hold(client)))
			if !m.replies.Load() {
				t.Error("a socket is held, and replies do not come back")
			}
		})
		for range 3 {
			m.verify(t)
		}
		wg.Wait()
		if !m.replies.Load() {
			t.Fatal("a socket is open, and replies do not come back")
		}
		m.Demand.Release(client)
	}
}
