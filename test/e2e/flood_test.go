package e2e

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

// tcpFlood is a flood in one lab: short connections and bulk streams to one address,
// until it is stopped.
type tcpFlood struct {
	stop  chan struct{}
	tasks sync.WaitGroup
	conns atomic.Int64 // short connections that were answered
	bytes atomic.Int64 // that came back on bulk streams
}

// floodTCP starts a flood of n clients of each kind.
func floodTCP(from *netns.Host, address string, short, bulk int) *tcpFlood {
	f := &tcpFlood{stop: make(chan struct{})}
	for range short {
		f.tasks.Go(func() {
			for !f.stopped() {
				if ask(from, address).err == nil {
					f.conns.Add(1)
				}
			}
		})
	}
	for range bulk {
		f.tasks.Go(func() {
			for !f.stopped() {
				f.stream(from, address)
			}
		})
	}
	return f
}

func (f *tcpFlood) stopped() bool {
	select {
	case <-f.stop:
		return true
	default:
		return false
	}
}

// stream sends through an echo server, and reads the echo, until the flood is
// stopped.
func (f *tcpFlood) stream(from *netns.Host, address string) {
	c, err := from.Dial("tcp", address)
	if err != nil {
		return
	}
	defer c.Close()
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			f.bytes.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	chunk := noise()[:64<<10]
	for !f.stopped() {
		if err := c.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
			break
		}
		if _, err := c.Write(chunk); err != nil && !isTimeout(err) {
			break
		}
	}
	c.Close()
	reading.Wait()
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, io.ErrShortWrite) || errors.As(err, &timeout) && timeout.Timeout()
}

// end stops the flood and waits for its clients.
func (f *tcpFlood) end() {
	close(f.stop)
	f.tasks.Wait()
}

// TestPromise8_FloodOfOneServiceSlowsNoOther keeps one service as busy as clients
// can, with short connections and bulk streams. It compares connections to another
// service with direct connections to the same server, alternating, so that both
// meet the same load of the machine.
func TestPromise8_FloodOfOneServiceSlowsNoOther(t *testing.T) {
	const connections = 80 // of each kind
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Backends[1].EchoTCP(t, 8080)
	busy := webService{name: "busy", vips: []string{vip4, vip6}, port: 80, endpoints: on(8080, lab.Backends[0])}
	calm := webService{name: "calm", vips: []string{"10.96.0.11", "fd00:96::11"}, port: 80, endpoints: on(8080, lab.Backends[1])}
	p := startProxy(t, lab, []webService{busy, calm})
	through := addresses(80, calm.vips...)
	past := addresses(8080, lab.Backends[1].IPv4.String(), lab.Backends[1].IPv6.String())

	// A connection through the proxy has two handshakes: it takes about 2 to 6 times as long.
	checkBearable(t, 25, func() (quiet, beside time.Duration) {
		flood := floodTCP(lab.Client, addresses(80, vip4)[0], 12, 2)
		quiet, beside = alternate(t, lab.Client, past, through, func(asked int) bool { return asked == connections })
		flood.end()
		t.Logf("%d connections and %d MiB of the flood", flood.conns.Load(), flood.bytes.Load()>>20)
		if flood.conns.Load() < connections || flood.bytes.Load() < 1<<20 {
			t.Errorf("the flood had %d connections and %d bytes: too few to prove anything", flood.conns.Load(), flood.bytes.Load())
		}
		return quiet, beside
	})
	p.stop()
	for _, r := range p.records() {
		if r.Service == "default/calm:http" && (r.Attempts != 1 || r.End == "limit") {
			t.Errorf("%s: %d attempts, %s", r.Client, r.Attempts, r.End)
		}
	}
}
