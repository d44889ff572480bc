package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestTakeOverOfNonsense: whatever a next process says and whenever it ends, the running one serves on
// with as many descriptors as before, and hands over to the next that makes sense.
func TestTakeOverOfNonsense(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "relay")
	address := addresses(80, vip4)[0]
	held := hold(t, lab.Client, address, 3)
	hello := &handover.Message{Step: handover.StepHello, Hello: &handover.Hello{
		Version: handover.Version, Least: handover.Least, Program: "odd", Mode: "sklookup/nftables", Moves: true,
	}}
	kept := func(dir string, files ...string) *handover.Message {
		return &handover.Message{Step: handover.StepKept, Wanted: &handover.Wanted{Dir: dir, Files: files}}
	}
	ask := &handover.Message{Step: handover.StepAsk}
	odd := [][]*handover.Message{
		{},
		{{Step: "nonsense"}},
		{ask},
		{{Step: handover.StepServing}, {Step: handover.StepLeft}},
		{{Step: handover.StepHello}},
		{hello, hello},
		{hello, {Step: handover.StepKept}},
		{hello, kept(p.manifests, "", "/", "..", "../../etc/passwd", "web.yaml/", strings.Repeat("x/", 5000)), kept("/", "etc/")},
		{hello, kept(p.manifests, slices.Repeat([]string{"web.yaml"}, 5000)...), {Step: handover.StepServing}},
		{hello, ask, {Step: handover.StepTaken, Taken: -1}},
		{hello, ask, {Step: handover.StepServing}},
		{hello, {Step: handover.StepMoved, Moved: []handover.Moved{{Kind: "tcp", Count: 1 << 30}}}},
		{{Step: handover.StepRefuse, Why: strings.Repeat("no", 10_000)}},
	}
	descriptors := 0
	for round := range 2 { // the first one opens what stays
		for i, messages := range odd {
			must.OKf(t, lab.Node.Do(func() error {
				c, err := handover.Dial("sluice")
				if err != nil {
					return err
				}
				defer c.Close()
				for _, m := range messages {
					_ = c.Send(m) // the running one may have hung up
				}
				for err == nil && i%2 == 0 { // else it ends in the middle of answers
					_, err = c.Receive(time.Second)
				}
				return nil
			}), "%d", i)
			check.OK(t, must.Err(lab.Client.Ask("tcp", address)))
		}
		wait.For(t, "no descriptor is left", startTimeout, func() error {
			switch n := p.descriptors(); {
			case round == 0:
				descriptors = n
			case n > descriptors:
				return fmt.Errorf("%d, and %d before", n, descriptors)
			}
			return nil
		})
	}
	alive(t, held)
	next := *p
	next.start("--datapath", "relay", "--take-over")
	p.waitExit()
	alive(t, held)
	next.stop()
}

// TestConnectionsEndWhileTheyMove: connections end at any moment of a take-over, by a FIN of either side or by a
// reset. Each end reaches the other side, and each connection has one record.
func TestConnectionsEndWhileTheyMove(t *testing.T) {
	t.Parallel()
	const connections, takeOvers = 120, 3
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "relay")
	address, whole := addresses(80, vip4)[0], 300*time.Millisecond
	for n := range takeOvers {
		list := hold(t, lab.Client, address, connections)
		began := time.Now()
		next := *p
		next.launch("--datapath", "relay", "--take-over")
		var ending sync.WaitGroup
		for i, c := range list {
			moment := time.Duration(rand.Int64N(int64(whole)))
			ending.Go(func() {
				time.Sleep(moment)
				c := c.(*net.TCPConn)
				if i%2 == 0 {
					_ = c.SetLinger(0)
				} else if check.OK(t, c.CloseWrite()); true {
					check.OKf(t, ended(c), "%s", c.LocalAddr())
				}
				_ = c.Close()
			})
		}
		p.waitExit()
		whole = time.Since(began)
		ending.Wait()
		p = &next
		p.awaitReady()
		records := p.awaitRecords((n + 1) * connections)
		ends := make(map[string]int)
		clients := make(map[netip.AddrPort]bool)
		for _, r := range records[n*connections:] {
			ends[r.End]++
			clients[r.Client] = true
		}
		if ends["client_fin"] != connections/2 || ends["client_reset"] != connections/2 || len(clients) != connections {
			t.Errorf("%d clients, ends %v", len(clients), ends)
		}
	}
	p.stop()
}

// TestEmptyDatagramsMove: datagrams of no byte go both ways before and after a take-over, and meanwhile.
func TestEmptyDatagramsMove(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 1)
		endpoint := must.Get(lab.Backends[0].ListenPacket("udp", ":8080"))(t)
		t.Cleanup(func() { _ = endpoint.Close() })
		go func() {
			for b := make([]byte, 10); ; {
				n, from, err := endpoint.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = endpoint.WriteTo(b[:n], from)
			}
		}()
		dns := webOn(lab)
		dns.protocol = "UDP"
		p := startProxy(t, lab, []webService{dns}, "--datapath", path)
		c := lab.Client.Connect(t, "udp", addresses(80, vip4)[0])
		exchanged := func(n int) {
			t.Helper()
			for range n {
				check.OK(t, must.Err(c.Write(nil)))
				_ = c.SetReadDeadline(time.Now().Add(startTimeout))
				size, err := c.Read(make([]byte, 10))
				if err != nil || size != 0 {
					t.Fatalf("%d bytes, %v", size, err)
				}
			}
		}
		exchanged(10)
		for range 2 {
			next := *p
			next.launch("--datapath", path, "--take-over")
			for gone := false; !gone; {
				exchanged(1)
				select {
				case <-p.exited:
					gone = true
				default:
				}
			}
			next.awaitReady()
			exchanged(10)
			p = &next
		}
		p.stop()
	})
}
