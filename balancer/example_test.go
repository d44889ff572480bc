package balancer_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/service"
)

// Three connections of one client to a Service whose second endpoint refuses. One of
// them finds that out; those that follow pass the endpoint over.
func ExampleBalancer_Next() {
	candidates := []service.Endpoint{
		{Addr: netip.MustParseAddrPort("10.1.0.1:8080")},
		{Addr: netip.MustParseAddrPort("10.1.0.2:8080")},
		{Addr: netip.MustParseAddrPort("10.1.0.3:8080")},
	}
	closed := candidates[1].Addr
	client := netip.MustParseAddr("10.9.0.1")
	b := balancer.New(balancer.Options{Seed: 3})
	now := time.Duration(0)
	for range 3 {
		var d balancer.Dial
		for {
			i, patience, ok := b.Next(&d, candidates, balancer.Conn{Client: netip.AddrPortFrom(client, 40000)}, int64(now))
			if !ok {
				fmt.Println("no endpoint answers")
				break
			}
			if i == balancer.Pause {
				now += patience
				continue
			}
			endpoint := candidates[i].Addr
			if endpoint == closed {
				fmt.Println(endpoint, "refuses; the patience was", patience)
				now += time.Millisecond
				b.Failed(&d, endpoint, client, int64(now))
				continue
			}
			fmt.Println(endpoint, "answers, attempts:", d.Attempts())
			b.Connected(&d, endpoint, client, int64(now))
			break
		}
	}
	// Output:
	// 10.1.0.2:8080 refuses; the patience was 250ms
	// 10.1.0.3:8080 answers, attempts: 2
	// 10.1.0.3:8080 answers, attempts: 1
	// 10.1.0.1:8080 answers, attempts: 1
}

// With session affinity, a client goes to the same endpoint again.
func ExampleDial_Affinity() {
	candidates := []service.Endpoint{
		{Addr: netip.MustParseAddrPort("10.1.0.1:8080")},
		{Addr: netip.MustParseAddrPort("10.1.0.2:8080")},
		{Addr: netip.MustParseAddrPort("10.1.0.3:8080")},
	}
	client := netip.MustParseAddr("10.9.0.1")
	b := balancer.New(balancer.Options{AffinityTimeout: 3 * time.Hour})
	pinned := -1
	for minute := range 3 {
		now := int64(time.Duration(minute) * time.Minute)
		var d balancer.Dial
		i, _, _ := b.Next(&d, candidates, balancer.Conn{Client: netip.AddrPortFrom(client, 40000)}, now)
		b.Connected(&d, candidates[i].Addr, client, now)
		fmt.Println("new:", d.Affinity() == balancer.AffinityNew, "hit:", d.Affinity() == balancer.AffinityHit, "same endpoint:", i == pinned)
		pinned = i
	}
	// Output:
	// new: true hit: false same endpoint: false
	// new: false hit: true same endpoint: true
	// new: false hit: true same endpoint: true
}
