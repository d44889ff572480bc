package e2e

import (
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// movedIn finds what a process says of connections that it has given.
var movedIn = regexp.MustCompile(`"connections":(\d+),"took":"([^"]*)","pause_p50":"([^"]*)","pause_p99":"([^"]*)"`)

// TestTakeOverPausesConnections has several processes in a row take over many relayed connections, and
// logs what each says of it: in what time they came, and how long each was with no process. All
// answer afterwards. SLUICE_TEST_MOVED is how many, and SLUICE_TEST_PAST how many have ended before;
// `make bench-takeover` moves 9,000, with as many records as --past keeps.
func TestTakeOverPausesConnections(t *testing.T) {
	connections, ended := 200, 200
	for name, n := range map[string]*int{"SLUICE_TEST_MOVED": &connections, "SLUICE_TEST_PAST": &ended} {
		if text := os.Getenv(name); text != "" {
			var err error
			if *n, err = strconv.Atoi(text); err != nil {
				t.Fatal(err)
			}
		}
	}
	const room = "9700" // 9,000 and new ones beside them, with 20,000 descriptors
	flags := []string{"--datapath", "relay", "--max-connections", room, "--max-connections-per-service", room, "--max-connections-per-namespace", room,
		"--max-udp-sessions", "16", "--max-listeners", "16", "--max-pipes", "32"}
	lab := netns.NewLab(t, 1)
	lab.Backends[0].ServeTCP(t, ":8080", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "b1\n")
		_, _ = io.Copy(c, struct{ io.Reader }{c}) // not io.Copy(c, c), which would keep two more descriptors
	})
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.relayed = "the test moves what the relay carries"
	p.start(flags...)
	address := addresses(80, vip4)[0]
	var left atomic.Int64
	left.Store(int64(ended))
	var before sync.WaitGroup
	for range 16 {
		before.Go(func() {
			for left.Add(-1) >= 0 {
				if err := askAndReset(lab.Client, address); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	before.Wait()
	empty := p.memory()
	open := hold(t, lab.Client, address, connections)
	p.awaitOpen(connections) // those before may still end
	t.Logf("%d connections take %d B of the process each", connections, (p.memory()-empty)/connections)
	began := time.Now()
	out, err := sluice(t, lab, "conns", "-o", "json", "state=open")
	if got := strings.Count(out, "\n"); err != nil || got != connections {
		t.Errorf("conns lists %d of %d connections: %v", got, connections, err)
	}
	t.Logf("conns lists them in %v", time.Since(began).Round(time.Millisecond))
	for range 5 {
		before := p
		next := *before
		p = &next
		p.start(append([]string{"--take-over"}, flags...)...)
		before.waitExit() // all connections are with the next one
		said := movedIn.FindStringSubmatch(before.stderr.String())
		if said == nil || said[1] != strconv.Itoa(connections) {
			t.Fatalf("the process before says that it has given %q, want %d connections", said, connections)
		}
		took := must.Get(time.ParseDuration(said[2]))(t)
		t.Logf("%d connections in %v (goal: 9000 in 0.5s), %.0f in a second; pause: p50 %s (goal: 5ms), p99 %s (goal: 50ms)",
			connections, took, float64(connections)/took.Seconds(), said[3], said[4])
	}
	began = time.Now()
	alive(t, open)
	t.Logf("all have answered within %v", time.Since(began))
	p.stop()
}

// askAndReset asks a server on a connection of its own and resets it, so that no TIME_WAIT keeps the port.
func askAndReset(from *netns.Host, address string) error {
	c, err := from.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.(*net.TCPConn).SetLinger(0); err != nil {
		return err
	}
	_, err = netns.AskOn(c)
	return err
}
