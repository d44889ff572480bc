package balancer

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// TestFullEndpoints: with each algorithm, and with session affinity, connections begin and end at
// random, and some attempts fail. No endpoint gets more connections than its limit, and Next
// says Full only if each endpoint is full or has failed this connection.
func TestFullEndpoints(t *testing.T) {
	const most, count = 3, 5
	for a := range Algorithm(len(algorithms)) {
		for _, affinity := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(a, affinity), func(t *testing.T) {
				list := endpoints(count)
				port := &service.Port{Limits: service.Limits{PerEndpoint: most}}
				port.Families[service.IPv4].Endpoints = list
				loads := &Loads{}
				b := New(Options{Algorithm: a, AffinityTimeout: affinity, Loads: loads, Port: port, Seed: 1})
				if _, ok := b.Independent(); ok {
					t.Error("the kernel would choose without looking at the limit")
				}
				rng := rand.New(rand.NewPCG(1, uint64(a)))
				var open []int // the endpoint of each connection
				now, fulls, moved := int64(1), 0, 0
				for range 3000 {
					now += int64(time.Millisecond)
					if len(open) > 0 && rng.IntN(5) < 2 {
						i := rng.IntN(len(open))
						loads.Of(list[open[i]].Addr).End()
						open[i] = open[len(open)-1]
						open = open[:len(open)-1]
						continue
					}
					var d Dial
					from := conn(client(rng.IntN(20)))
					tried := map[int]bool{}
					for {
						i, pause, ok := b.Next(&d, list, from, now)
						if ok && i == Pause {
							now += int64(pause)
							continue
						}
						if !ok {
							t.Fatalf("it fails after these endpoints: %v", tried)
						}
						if i == Full {
							fulls++
							for e := range list {
								if !tried[e] && loads.Of(list[e].Addr).Open() < most {
									t.Fatalf("endpoint %d has %d of %d connections and was not tried: %v", e, loads.Of(list[e].Addr).Open(), most, tried)
								}
							}
							break
						}
						if n := loads.Of(list[i].Addr).Open(); n >= most {
							t.Fatalf("endpoint %d has %d connections, and gets one more", i, n)
						}
						if rng.IntN(10) == 0 {
							tried[i] = true
							b.Failed(&d, list[i].Addr, from.Client.Addr(), now)
							now += int64(time.Millisecond)
							continue
						}
						if len(tried) > 0 {
							moved++
						}
						loads.Of(list[i].Addr).Begin()
						b.Connected(&d, list[i].Addr, from.Client.Addr(), now)
						open = append(open, i)
						break
					}
				}
				if fulls == 0 || moved == 0 || len(open) < most*count/2 {
					t.Errorf("%d connections found all full, %d went on after a failure, %d are open", fulls, moved, len(open))
				}
			})
		}
	}
}

// TestBeginBelow: of connections that begin at the same moment, those above the limit do not.
func TestBeginBelow(t *testing.T) {
	var l Load
	began := make(chan bool)
	for range 40 {
		go func() { began <- l.BeginBelow(7) }()
	}
	n := 0
	for range 40 {
		if <-began {
			n++
		}
	}
	if n != 7 || l.Open() != 7 {
		t.Errorf("%d of 40 began, and %d are counted; want 7", n, l.Open())
	}
}
