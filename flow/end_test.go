package flow

import (
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// endAll ends all connections, as an operator does, and returns how
// many there were.
func (n *node) endAll() (ended int) {
	n.t.Helper()
	// Userspace hears of flows somewhat later.
	wait.True(n.t, "a flow", func() bool { return n.server.Stats().Open > 0 })
	ended, err := n.table.EndWhere(context.Background(), n.post, math.MaxInt, conntrack.Admin, func(*conntrack.Record) bool { return true })
	must.OK(n.t, err)
	return ended
}

func TestOperatorEndsFlows(t *testing.T) {
	lab := netns.NewLab(t, 1)
	echo := lab.Backends[0]
	echo.EchoTCP(t, 8080)
	echo.EchoUDP(t, 8080)
	n := newNode(t, lab, nil)
	wantAdmin := func(records int) {
		t.Helper()
		wait.True(t, "a record", func() bool { return len(n.taken()) == records })
		if r := n.taken()[records-1]; r.End != conntrack.Admin {
			t.Errorf("%+v", r)
		}
	}

	n.apply(svc(vip4, nil, at(echo.IPv4, 8080)))
	open := lab.Client.Connect(t, "tcp", vip4+":80")
	must.OK(t, must.Err(netns.AskOn(open)))
	n.endAll()
	_ = open.SetReadDeadline(time.Now().Add(patience))
	check.ErrorIsf(t, must.Err(open.Read(make([]byte, 1))), syscall.ECONNRESET, "an open connection")
	wantAdmin(1)

	session := lab.Client.Connect(t, "udp", vip4+":80")
	for i := range 2 {
		if said, err := question(session); err != nil || !strings.HasPrefix(said, "b1:8080") {
			t.Fatalf("session %d: %q, %v", i, said, err)
		}
		n.endAll()
		wantAdmin(2 + i)
	}

	n.apply(svc(vip4, nil, at(nobodyAt(t, lab, echo), 8080)))
	took := time.Hour
	for try := 0; try < 5 && took > time.Second; try++ { // a busy machine delays some
		failed := make(chan error, 1)
		began := time.Now()
		go func() {
			c, err := lab.Client.Dialer(&net.Dialer{Timeout: patience}, "tcp", vip4+":80")
			if err == nil {
				_ = c.Close()
			}
			failed <- err
		}()
		wait.True(t, "an endpoint is asked", func() bool { return n.endAll() == 1 })
		check.ErrorIsf(t, <-failed, syscall.ECONNREFUSED, "a handshake")
		took = time.Since(began)
		wantAdmin(4 + try)
	}
	if took > time.Second { // the client would have sent its SYN again
		t.Errorf("a handshake was refused after %v", took)
	}
}

// Connections that are over leave the table sooner than those that a forged RST may have ended.
func TestLingers(t *testing.T) {
	fins := bpf.KernelSeenCLIENT_FIN | bpf.KernelSeenENDPOINT_FIN | bpf.KernelSeenCLIENT_FIN_ACKED | bpf.KernelSeenENDPOINT_FIN_ACKED
	all := newLingering(1)
	for seen, want := range map[bpf.KernelSeen]time.Duration{
		fins:                              lingerDone,
		bpf.KernelSeenCLIENT_RST:          linger,
		bpf.KernelSeenENDPOINT_RST:        linger,
		fins | bpf.KernelSeenENDPOINT_RST: linger,
		fins&^bpf.KernelSeenCLIENT_FIN_ACKED | bpf.KernelSeenCLIENT_RST: linger,
	} {
		check.Equalf(t, all.queue(seen).wait, want, "%b", seen)
	}
}

// A reset ends a connection whatever came before, unless its sender had finished: then it answers a
// repeated segment, such as a FIN.
func TestEndOf(t *testing.T) {
	const (
		clientFin, endpointFin     = bpf.KernelSeenCLIENT_FIN, bpf.KernelSeenENDPOINT_FIN
		clientAcked, endpointAcked = bpf.KernelSeenCLIENT_FIN_ACKED, bpf.KernelSeenENDPOINT_FIN_ACKED
		clientRST, endpointRST     = bpf.KernelSeenCLIENT_RST, bpf.KernelSeenENDPOINT_RST
	)
	for _, c := range []struct {
		first, seen bpf.KernelSeen
		want        conntrack.End
	}{
		{clientFin, clientFin | endpointFin | clientAcked | endpointAcked, conntrack.ClientFin},
		{endpointFin, clientFin | endpointFin | clientAcked | endpointAcked, conntrack.EndpointFin},
		{clientRST, clientRST, conntrack.ClientReset},
		{endpointRST, endpointRST | clientRST, conntrack.EndpointReset},
		{clientFin, clientFin | clientRST, conntrack.ClientReset},
		{clientFin, clientFin | endpointFin | clientRST, conntrack.ClientReset}, // it has not read all
		{endpointFin, endpointFin | endpointAcked | clientRST, conntrack.ClientReset},
		{clientFin, clientFin | endpointFin | endpointAcked | clientRST, conntrack.ClientFin},
		{endpointFin, clientFin | endpointFin | endpointAcked | clientRST, conntrack.EndpointFin},
		{clientFin, clientFin | clientAcked | endpointRST, conntrack.EndpointReset},
		{endpointFin, clientFin | endpointFin | endpointRST, conntrack.EndpointReset},
		{endpointFin, clientFin | endpointFin | clientAcked | endpointRST, conntrack.EndpointFin},
	} {
		check.Equalf(t, endOf(c.first, c.seen), c.want, "ends %b, the first %b", c.seen, c.first)
	}
}

// A client may begin a connection with the ports of one whose end is not reported yet. The old one's
// index is released once: otherwise two flows would get it.
func TestReplacedFlowIsReleasedOnce(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
	must.OK(t, must.Err(netns.AskOn(c)))
	wait.True(t, "a flow", func() bool { return n.server.Stats().Open == 1 })
	w := n.server.worker
	must.OK(t, n.server.onLoop(func() error {
		defer w.endRound()
		f := w.flows[slices.IndexFunc(w.flows, func(f *flow) bool { return f != nil })]
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
		if err := wait.Poll(patience, func() error {
			if f.state() != bpf.KernelStateCLOSED {
				return errors.New("it is open")
			}
			return nil
		}); err != nil {
			return err
		}
		f.replaced(w.loop.Now())
		w.expire(math.MaxInt64)
		return nil
	}))
	if spare, open := w.spares.Len(), n.server.Stats().Open; spare != len(w.flows)-1 || open != 0 {
		t.Errorf("%d of %d indices are free, %d flows are open", spare, len(w.flows)-1, open)
	}
	wait.True(t, "a record", func() bool { return len(n.taken()) > 0 })
	if r := n.taken(); len(r) != 1 || r[0].End != conntrack.ClientReset {
		t.Errorf("records: %+v", r)
	}
}
