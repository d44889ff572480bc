package e2e

import (
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestManyTakeOversLeaveNothing: what a process and its node have does not grow from take-over to
// take-over, and connections and sessions last.
func TestManyTakeOversLeaveNothing(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		takeOvers := 7
		if full() {
			takeOvers = 100
		}
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		lab.Backends[0].EchoUDP(t, 8080)
		web, dns := webOn(lab), webOn(lab)
		dns.name, dns.vips, dns.protocol = "dns", []string{"10.96.0.53", "fd00:96::53"}, "UDP"
		p := prepareProxy(t, lab, []webService{web, dns})
		flags := []string{"--datapath", path, "--udp-timeout", "10m", "--history"}
		p.start(flags...)
		held := hold(t, lab.Client, addresses(80, vip4)[0], 3)
		var sessions []net.Conn
		for range 3 {
			sessions = append(sessions, lab.Client.Connect(t, "udp", addresses(80, dns.vips...)[1]))
		}
		var early, last left
		for i := range takeOvers {
			next := *p
			next.start(append(flags, "--take-over")...)
			p.waitExit()
			p = &next
			for _, c := range sessions {
				check.OK(t, askByDatagram(c, startTimeout))
			}
			alive(t, held)
			if i == 2 {
				early = p.left(lab)
			}
		}
		wait.For(t, "nothing has grown", startTimeout, func() error {
			last = p.left(lab)
			const chance = 3 // what differs by the moment
			grown := last.descriptors > early.descriptors+chance || last.goroutines > early.goroutines+chance || last.memory > early.memory*3/2
			if grown || last.pins != early.pins || last.kernel != early.kernel {
				return fmt.Errorf("after 3 take-overs %+v, after %d %+v", early, takeOvers, last)
			}
			return nil
		})
		t.Logf("after 3 take-overs %+v, after %d %+v", early, takeOvers, last)
		for _, c := range held {
			_ = c.Close()
		}
		p.awaitRecords(len(held))
		p.stop()
	})
}

// left is what a process and its node have; of the kernel, lines of routes, rules and sets.
type left struct {
	descriptors, goroutines, memory, pins, kernel int
}

func (p *proxy) left(lab *netns.Lab) (l left) {
	p.t.Helper()
	m := must.Get(p.metrics())(p.t)
	l = left{descriptors: p.descriptors(), goroutines: int(m["go_goroutines"]), memory: p.memory(), kernel: strings.Count(lab.Node.Dump(p.t), "\n")}
	for _, dir := range pinDirs(p.t, lab.Node) {
		_ = filepath.WalkDir(dir, func(string, fs.DirEntry, error) error { l.pins++; return nil })
	}
	return l
}
