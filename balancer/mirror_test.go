package balancer

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
)

// mirror is a Mirror.
type mirror map[netip.Addr]netip.AddrPort

func (m mirror) Pin(client netip.Addr, ep netip.AddrPort, _ int64) { m[client] = ep }
func (m mirror) Unpin(client netip.Addr)                           { delete(m, client) }

// TestMirrorHasThePins plays random connections, some of which begin at the mirror's endpoint without
// the Balancer: it never has another endpoint than the client's pin, no client whose endpoint has never
// answered (A5.7), none that is evicted or has expired, and nothing without affinity (A5.5).
func TestMirrorHasThePins(t *testing.T) {
	const clients, most, window = 40, 16, int64(time.Second)
	rng := rand.New(rand.NewPCG(7, 7))
	m, list := make(mirror), endpoints(5)
	o := Options{AffinityTimeout: time.Duration(window), MaxPins: most, Seed: 1}
	b := New(o)
	b.SetMirror(m)
	answered := make(map[netip.Addr]map[netip.AddrPort]bool)
	hits := 0
	for now := int64(1); now < 40*window; now += rng.Int64N(window / 20) {
		client := netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(clients))})
		switch ep, told := m[client]; {
		case told && rng.IntN(2) == 0: // the table decides
			kept := b.Kept(client, ep, now)
			if kept == AffinityMoved {
				t.Fatalf("%s is at %s, which is not its pin", client, ep)
			}
			if kept == AffinityHit {
				hits++
			}
			b.Connected(nil, ep, client, now)
		default:
			var d Dial
			i, _, ok := b.Next(&d, list, Conn{Client: netip.AddrPortFrom(client, 1)}, now)
			if !ok || i < 0 {
				continue
			}
			if told && d.Affinity() == AffinityHit && list[i].Addr != ep {
				t.Fatalf("%s goes to %s, the mirror says %s", client, list[i].Addr, ep)
			}
			switch rng.IntN(4) {
			case 0:
				b.Failed(&d, list[i].Addr, client, now)
				if at, is := m[client]; is && at == list[i].Addr {
					t.Fatalf("%s stays at %s, which has failed", client, at)
				}
			case 1: // it has not answered yet
			default:
				if answered[client] == nil {
					answered[client] = make(map[netip.AddrPort]bool)
				}
				answered[client][list[i].Addr] = true
				b.Connected(&d, list[i].Addr, client, now)
				must.Equalf(t, m[client], list[i].Addr, "where the mirror says that %s is", client)
			}
		}
		if len(m) > most {
			t.Fatalf("%d clients, of %d", len(m), most)
		}
		pins := make(map[netip.Addr]netip.AddrPort)
		for _, p := range b.Pinned(0, now) {
			pins[p.Client] = p.Endpoint
		}
		for client, ep := range m {
			if at, is := pins[client]; is && at != ep || !answered[client][ep] {
				t.Fatalf("%s is at %s, the mirror says %s", client, at, ep)
			}
		}
	}
	if len(m) == 0 || hits == 0 {
		t.Errorf("%d clients, %d hits", len(m), hits)
	}
	o.AffinityTimeout = 0
	if b.Configure(o); len(m) > 0 {
		t.Errorf("without affinity, %d clients are there", len(m))
	}
}
