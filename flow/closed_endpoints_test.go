package flow

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// While two of three endpoints are closed, and nobody answers, each datagram of new sessions arrives
// once: a session sends one, waits until that has arrived, and sends the others.
func TestClosedEndpointsCostNoDatagram(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		const sessions, each = 200, 7
		lab := netns.NewLab(t, 3)
		sink := must.Get(lab.Backends[2].ListenPacket("udp4", ":8080"))(t)
		defer sink.Close()
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080), at(lab.Backends[2].IPv4, 8080)))
		arrived := map[string]int{}
		b := make([]byte, 1<<10)
		await := func(what string) {
			t.Helper()
			for arrived[what] == 0 {
				_ = sink.SetReadDeadline(time.Now().Add(patience))
				size, _, err := sink.ReadFrom(b)
				if err != nil {
					t.Fatalf("%s has not arrived: %v; %d have", what, err, len(arrived))
				}
				arrived[string(b[:size])]++
			}
		}
		var open []net.Conn
		for s := range sessions {
			c := lab.Client.Connect(t, "udp", vip4+":80")
			open = append(open, c)
			must.OK(t, must.Err(fmt.Fprintf(c, "%d/0", s)))
			await(fmt.Sprintf("%d/0", s))
		}
		for i := 1; i < each; i++ {
			for s, c := range open {
				must.OK(t, must.Err(fmt.Fprintf(c, "%d/%d", s, i)))
				await(fmt.Sprintf("%d/%d", s, i))
			}
		}
		for what, times := range arrived {
			check.Equalf(t, times, 1, "how often %s has arrived", what)
		}
		wait.True(t, "userspace knows all sessions", func() bool { return n.server.Stats().Open == sessions })
	})
}
