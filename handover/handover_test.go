package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
)

// pair returns the two ends of a take-over's connection: the running process's and the next
// one's.
func pair(t *testing.T) (running, next *Conn) {
	t.Helper()
	if c, is := sys.Missing(sys.NetAdmin); is {
		t.Skipf("SKIP-NEEDS: %s", c)
	}
	o, err := Listen(t.Name(), func() (r Running) { return r })
	must.OK(t, err)
	defer o.Close()
	var failed error
	dialed := make(chan struct{})
	go func() {
		defer close(dialed)
		next, failed = Dial(t.Name())
	}()
	running, err = o.Accept()
	<-dialed
	must.OK(t, errors.Join(err, failed))
	t.Cleanup(func() { _, _ = running.Close(), next.Close() })
	return running, next
}

// sockets makes listening sockets, and returns their addresses by name.
func sockets(t *testing.T, n int) (list []Socket, at map[string]netip.AddrPort) {
	t.Helper()
	at = make(map[string]netip.AddrPort)
	for i := range n {
		l, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		must.OK(t, err)
		f, err := l.File()
		must.OK(t, err)
		t.Cleanup(func() { _, _ = f.Close(), l.Close() })
		name := fmt.Sprintf("socket %d", i)
		list = append(list, Socket{Name: name, State: "accept", FD: int(f.Fd())})
		at[name] = l.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	return list, at
}

// TestAllSocketsArrive: more than a batch of sockets arrives, each by its name, with the
// addresses of clients.
func TestAllSocketsArrive(t *testing.T) {
	running, next := pair(t)
	list, at := sockets(t, 2*batch+10)
	var clients []netip.Addr
	for a := netip.MustParseAddr("10.0.0.1"); len(clients) < 2*clientsBatch+1; a = a.Next() {
		clients = append(clients, a)
	}
	given := make(chan error, 1)
	go func() { given <- running.Give(list, clients) }()
	taken, theirs, err := next.Take()
	must.OK(t, err)
	defer taken.Close()
	must.OK(t, <-given)
	if !slices.Equal(theirs, clients) {
		t.Errorf("%d clients have arrived, want %d in the same order", len(theirs), len(clients))
	}
	if n := len(taken.Names()); n != len(list) {
		t.Errorf("%d sockets have arrived, want %d", n, len(list))
	}
	for name, want := range at {
		found := taken.Take(name)
		if len(found) != 1 || found[0].State != "accept" {
			t.Fatalf("%s: %+v", name, found)
		}
		if got, errno := sys.LocalAddr(found[0].FD); errno != 0 || got != want {
			t.Errorf("%s is at %s (%v), want %s", name, got, errno, want)
		}
		sys.Close(found[0].FD)
	}
}

// TestLostDescriptorsAreNoticed: the kernel drops descriptors without an error where the
// receiver is at its limit of open files. Then nothing is taken over, and nothing stays open.
func TestLostDescriptorsAreNoticed(t *testing.T) {
	running, next := pair(t)
	list, _ := sockets(t, 100)
	before := descriptors(t)
	var limit syscall.Rlimit
	must.OK(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = uint64(highest(t) + 50)
	must.OK(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low))
	given := make(chan error, 1)
	go func() { given <- running.Give(list, nil) }()
	_, _, err := next.Take()
	must.OK(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	if err == nil {
		t.Fatal("all have arrived")
	}
	_ = next.Close()
	if err := <-given; err == nil {
		t.Error("the giver believes that all have arrived")
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors are open, were %d", after, before)
	}
}

// TestEachBatchIsAcknowledged: a receiver that claims fewer than a batch has ends the giving,
// before the next batch.
func TestEachBatchIsAcknowledged(t *testing.T) {
	running, next := pair(t)
	list, _ := sockets(t, 2*batch)
	given := make(chan error, 1)
	go func() { given <- running.Give(list, nil) }()
	m, fds, err := next.receive(Patience)
	if err != nil || len(fds) != batch {
		t.Fatalf("%+v with %d descriptors, %v; want %d", m, len(fds), err, batch)
	}
	closeAll(fds)
	select {
	case err := <-given:
		t.Fatalf("given before the first batch was acknowledged: %v", err)
	default:
	}
	must.OK(t, next.Send(&Message{Step: StepTaken, Taken: batch - 1}))
	if err := <-given; err == nil {
		t.Error("a batch that has not arrived whole is taken for given")
	}
	_ = running.Close()
	if m, fds, err := next.receive(Patience); err == nil {
		closeAll(fds)
		t.Errorf("%s with %d descriptors follows a batch that has not arrived whole", m.Step, len(fds))
	}
}

// TestUnknownFieldsArePassedOver: a later version may say more.
func TestUnknownFieldsArePassedOver(t *testing.T) {
	m, err := parse([]byte(`{"step":"sockets","new":{"a":[1]},"sockets":[{"name":"x","state":"drop","more":1}]}`))
	if err != nil || len(m.Sockets) != 1 || m.Sockets[0] != (Socket{Name: "x", State: "drop"}) {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestVersionsFit: two processes understand each other if their ranges of versions meet.
func TestVersionsFit(t *testing.T) {
	for _, row := range []struct {
		version, least int
		fits           bool
	}{
		{Version, Least, true},
		{Version + 3, Version, true},
		{Version + 3, Version + 1, false},
		{Least - 1, Least - 1, false},
	} {
		h := Hello{Version: row.version, Least: row.least}
		if err := h.Fits(); (err == nil) != row.fits {
			t.Errorf("versions %d to %d: %v, want that they fit: %v", row.least, row.version, err, row.fits)
		}
	}
}

// TestRefusalSaysWhy: the next process learns the reason, and whether it may ask for a stop.
func TestRefusalSaysWhy(t *testing.T) {
	running, next := pair(t)
	must.OK(t, running.Send(&Message{Step: StepRefuse, Why: "another mode", Switch: true}))
	_, err := next.Await(StepWelcome, Patience)
	var refused *RefusedError
	if !errors.As(err, &refused) || *refused != (RefusedError{"another mode", true}) {
		t.Errorf("%v, want the refusal", err)
	}
	_ = running.Close()
	if _, err := next.Await(StepWelcome, Patience); !Gone(err) {
		t.Errorf("%v, want that the other one is gone", err)
	}
}

// TestNobodyOffers: there is nothing to take over.
func TestNobodyOffers(t *testing.T) {
	if _, err := Dial(t.Name()); !errors.Is(err, ErrNobody) {
		t.Errorf("%v, want ErrNobody", err)
	}
}

// descriptors counts this process's open files.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must.OK(t, err)
	return len(list)
}

// highest returns the highest descriptor in use.
func highest(t *testing.T) (most int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must.OK(t, err)
	for _, e := range list {
		var n int
		_, _ = fmt.Sscan(e.Name(), &n)
		most = max(most, n)
	}
	return most
}

// FuzzMessage: no packet makes the parser panic, and what it accepts survives a round trip.
func FuzzMessage(f *testing.F) {
	f.Add([]byte(`{"step":"hello","hello":{"version":1,"least":1,"program":"v0.1.0","mode":"bind"}}`))
	f.Add([]byte(`{"step":"clients","clients":["10.0.0.1","fd00::1"]}`))
	f.Add([]byte(`{"step":"sockets","sockets":[{"name":"tcp bound 10.0.0.1:80","state":"refuse"}]}`))
	f.Add([]byte(`{"step":`))
	f.Fuzz(func(t *testing.T, p []byte) {
		m, err := parse(p)
		if err != nil {
			return
		}
		text, err := json.Marshal(m)
		must.OKf(t, err, "%+v", m)
		again, err := parse(text)
		must.OKf(t, err, "%s", text)
		if twice, err := json.Marshal(again); err != nil || string(twice) != string(text) {
			t.Errorf("%s, and again %s, %v", text, twice, err)
		}
	})
}
