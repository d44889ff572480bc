package e2e

import (
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestQuietConnectionsEnd has an idle connection and a half-closed one, beside one
// that keeps talking.
func TestQuietConnectionsEnd(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--idle-timeout", "10s", "--half-closed-timeout", "1s")
	target := addresses(80, vip4)[0]
	began := time.Now()
	quiet, half, busy := j.join(t, lab.Client, target), j.join(t, lab.Client, target), j.join(t, lab.Client, target)
	transfer(t, quiet.client, quiet.server, "before")
	transfer(t, half.client, half.server, "before")
	must.OK(t, half.client.CloseWrite())
	over := make(chan error, 4)
	for _, c := range []net.Conn{quiet.client, quiet.server, half.client, half.server} {
		go func() {
			err := ended(c)
			if err == nil {
				err = ended(c) // of the half that the client closed
			}
			over <- err
		}()
	}
	left := cap(over)
	wait.For(t, "the quiet ones end", stopTimeout, func() error {
		transfer(t, busy.client, busy.server, "still here")
		transfer(t, busy.server, busy.client, "so am I")
		select {
		case <-over:
			left--
		default:
		}
		if left > 0 {
			return errNotYet
		}
		return nil
	})
	if took := time.Since(began); took < 9500*time.Millisecond {
		t.Errorf("they ended after %v already", took)
	}
	ends := map[string]int{}
	for _, r := range p.awaitRecords(2) {
		ends[r.End]++
	}
	check.Equalf(t, ends["idle"], 2, "the records end with %v", ends)
	p.stop()
	p.wantEnds(t, "idle", "idle", "shutdown")
}

// TestSoak makes connections for a set time, and expects the proxy to be no larger
// at the end than after the first part of them.
func TestSoak(t *testing.T) {
	count := 4000
	if full() {
		count = 1000000
	}
	lab := netns.NewLab(t, 3)
	lab.EchoTCP(t, 8080)
	// The clients close first, so that TIME_WAIT occupies their ports.
	for key, value := range map[string]string{"net/ipv4/tcp_tw_reuse": "1", "net/ipv4/ip_local_port_range": "1024 65535"} {
		must.OK(t, lab.Client.SetSysctl(key, value))
	}
	p := startProxy(t, lab, []webService{webOn(lab)})
	targets := addresses(80, vip4, vip6)
	part := func(n int) {
		t.Helper()
		failures := 0
		for _, v := range crowd(n, 32, func(i int) visit { return ask(lab.Client, targets[i%2]) }) {
			if v.err != nil {
				if failures++; failures <= 5 {
					t.Error(v.err)
				}
			}
		}
	}
	part(count / 4)
	before, memory := p.settle(nil), p.memory()
	start := time.Now()
	part(count - count/4)
	t.Logf("%.0f connections a second", float64(count-count/4)/time.Since(start).Seconds())
	after, grown := p.settle(&before), p.memory()-memory
	t.Logf("after %d connections: %v; memory was %d KiB, grew by %d KiB", count, after, memory>>10, grown>>10)
	if allowed := 8<<20 + memory/4; grown > allowed {
		t.Errorf("memory grew by %d bytes", grown)
	}
	p.stop()
	check.Equalf(t, len(p.records()), count, "records")
}
