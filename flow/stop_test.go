package flow

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections that a stop cuts end with a reset: a FIN would make a truncated stream look
// complete.
func TestStopResetsConnections(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		for _, c := range []struct {
			vip      string
			endpoint *netns.Host
		}{{vip4, lab.Backends[0]}, {vip6, lab.Backends[0]}} {
			n := newNode(t, lab, by)
			addr := c.endpoint.IPv4
			if c.vip == vip6 {
				addr = c.endpoint.IPv6
			}
			n.apply(svc(c.vip, nil, at(addr, 8080)))
			var held []net.Conn
			for range 10 {
				conn := must.Get(lab.Client.Dial("tcp", net.JoinHostPort(c.vip, "80")))(t)
				defer conn.Close()
				must.OK(t, must.Err(netns.AskOn(conn)))
				held = append(held, conn)
			}
			n.stop()
			n.left = true
			for _, conn := range held {
				_ = conn.SetReadDeadline(time.Now().Add(patience))
				if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
					t.Fatalf("%s: %v", c.vip, err)
				}
			}
			n.end()
		}
	})
}

// A stop waits for an access log that is too slow, so that each flow leaves its record, but
// not for one that takes nothing: flows are reset without a record then, which is counted.
func TestStopWaitsForTheAccessLog(t *testing.T) {
	t.Parallel()
	for _, stuck := range []bool{false, true} {
		t.Run(fmt.Sprintf("stuck=%t", stuck), func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			n := newNode(t, lab, nil)
			n.left = true // this test stops it
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			conn := lab.Client.Connect(t, "tcp", net.JoinHostPort(vip4, "80"))
			must.OK(t, must.Err(netns.AskOn(conn)))
			record := func() {
				r, shard := new(conntrack.Record), n.table.Shard(0)
				shard.Open(r)
				shard.Close(r)
				shard.Flush()
			}
			n.records.Lock() // the access log takes one record, and then nothing
			room := n.table.Room()
			begun, done := make(chan struct{}), make(chan struct{})
			n.loop.Post(func() {
				n.server.worker.readNotices()
				record()
			})
			wait.True(t, "the access log has a record", func() bool { return n.table.Stats().Queued == 1 && n.table.Room() == room })
			n.loop.Post(func() {
				defer close(begun)
				for n.table.Room() > 0 {
					record()
				}
				s := stopper{worker: n.server.worker, since: poll.Nanotime() + int64(patience), done: func() { close(done) }}
				if stuck {
					s.since = poll.Nanotime() - roomPatience - 1
				}
				s.HandleTimer(nil)
			})
			<-begun
			check.Equalf(t, n.server.Stats().Open == 0, stuck, "ended without room for its record")
			n.records.Unlock()
			<-done
			_ = conn.SetReadDeadline(time.Now().Add(patience))
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Error(err)
			}
			dropped := 0
			if stuck {
				dropped = 1
			}
			check.Equalf(t, n.table.Stats().Dropped, uint64(dropped), "records that were dropped")
		})
	}
}
