package poll

import (
	"math/rand/v2"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

type nobody struct{ id int }

func (*nobody) HandleEvents(uint8, Events) {}

// TestSlotsAgainstModel compares the table with a map that never reuses a key.
func TestSlotsAgainstModel(t *testing.T) {
	type entry struct {
		handler Handler
		fd      int32
		tag     uint8
		live    bool
	}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var table slots
		model := map[Registration]*entry{}
		var all []Registration
		live := 0
		for range 3000 {
			switch {
			case len(all) == 0 || rng.IntN(2) == 0 && live < 40:
				e := &entry{handler: &nobody{len(all)}, fd: int32(rng.IntN(1000)), tag: uint8(rng.IntN(3)), live: true}
				r := table.take(int(e.fd), e.tag, e.handler)
				if !r.Valid() || model[r] != nil {
					t.Fatalf("registration %+v was given out before", r)
				}
				model[r] = e
				all = append(all, r)
				live++
			default:
				r := all[rng.IntN(len(all))]
				if e := model[r]; e.live {
					table.free(r)
					e.live = false
					live--
				}
			}
			r := all[rng.IntN(len(all))]
			s, e := table.find(r), model[r]
			if (s != nil) != e.live {
				t.Fatalf("%+v: found %v, live %v", r, s != nil, e.live)
			}
			if s != nil && (s.handler != e.handler || s.fd != e.fd || s.tag != e.tag) {
				t.Fatalf("%+v: %+v, want %+v", r, s, e)
			}
			must.Equalf(t, table.used, live, "used")
		}
		if len(table.list) > 41 {
			t.Fatalf("%d slots for 40 descriptors", len(table.list))
		}
	}
	if (&slots{}).find(Registration{}) != nil || (&slots{}).find(Registration{slot: 7}) != nil {
		t.Fatal("a registration that never was is found")
	}
}
