package flow

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A connection releases its record after a moment. Lists, and the record at the end, are the same as
// without that.
func TestOpenConnectionIsParked(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].WitnessTCP(t, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		c := must.Get(lab.Client.Dial("tcp", net.JoinHostPort(vip4, "80")))(t)
		defer c.Close()
		must.OK(t, must.Err(netns.AskOn(c)))
		opened := n.listed()
		wait.True(t, "the record is given away", func() bool { return n.isParked() })
		parked := n.listed()
		if !n.isParked() {
			t.Error("a list unparks")
		}
		_ = c.Close()
		n.wait(t, 1)
		ended := n.taken()[0]
		for _, r := range []*conntrack.Record{&parked, &ended} {
			if r.Client.String() != c.LocalAddr().String() || r.VIP.String() != c.RemoteAddr().String() ||
				r.ID != opened.ID || r.Wall != opened.Wall || r.Start != opened.Start || r.Client != opened.Client || r.VIP != opened.VIP || r.Port != opened.Port ||
				r.Endpoint != opened.Endpoint || r.SourceAddr != opened.SourceAddr || r.Counters != opened.Counters || r.ConnectTime != opened.ConnectTime ||
				r.Attempts != 1 || r.Protocol != opened.Protocol || r.Kind != opened.Kind || r.Source != opened.Source || r.Path != opened.Path || !r.Connected ||
				r.BytesFromEndpoint == 0 {
				t.Errorf("%+v\nbefore:\n%+v", r, opened)
			}
		}
		if ended.End != conntrack.ClientFin || ended.Duration <= 0 || ended.FirstByte <= 0 {
			t.Errorf("the end: %+v", ended)
		}
	})
}

// A parked connection can be ended from outside.
func TestParkedConnectionIsEnded(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	c := lab.Client.Connect(t, "tcp", net.JoinHostPort(vip4, "80"))
	wait.True(t, "the record is given away", func() bool { return n.isParked() })
	ended, err := n.table.EndWhere(context.Background(), n.post, 10, conntrack.Admin, func(r *conntrack.Record) bool { return r.Client.Addr() == lab.Client.IPv4 })
	if ended != 1 || err != nil {
		t.Fatalf("%d ended: %v", ended, err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	for b := make([]byte, 100); err == nil; {
		_, err = c.Read(b)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the client was not reset")
	}
}

func (n *node) post(_ int, f func()) bool { return n.loop.Post(f) }

// listed is the record of the only open connection.
func (n *node) listed() (r conntrack.Record) {
	n.t.Helper()
	wait.True(n.t, "the connection is listed as open", func() bool {
		count := 0
		err := n.table.List(context.Background(), n.post, func(got *conntrack.Record) error {
			r = *got
			count++
			return nil
		})
		return err == nil && count == 1 && r.Connected
	})
	return r
}

// isParked reports whether the only connection has no record.
func (n *node) isParked() (is bool) {
	done := make(chan struct{})
	n.loop.Post(func() {
		defer close(done)
		for _, f := range n.server.worker.flows {
			is = is || f != nil && f.record == nil
		}
	})
	<-done
	return is
}

// A connection that was open for a while, and whose client closes it when its endpoint has gone,
// ends after the time for half-closed ones.
func TestParkedConnectionIsHalfClosed(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].WitnessTCP(t, 8080)
		n := newNode(t, lab, func(o *Options) {
			by(o)
			o.HalfClosedTimeout = time.Second
		})
		n.serve(0)
		c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
		must.OK(t, must.Err(netns.AskOn(c)))
		wait.True(t, "the record is given away", n.isParked)
		n.silence(0)
		_ = c.Close()
		n.wait(t, 1)
		if r := n.taken()[0]; r.End != conntrack.Idle {
			t.Errorf("%+v", r)
		}
	})
}
