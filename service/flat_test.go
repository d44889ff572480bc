package service

import (
	"maps"
	"math/rand/v2"
	"testing"
)

// TestFlatAgainstMap puts and removes random keys with many hash collisions and
// compares the table with a map. A clone must keep its content.
func TestFlatAgainstMap(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(1, seed))
		spread := uint64(1 + r.IntN(40))
		hash := func(k uint64) uint64 { return k % spread * 0x9e3779b97f4a7c15 >> 60 }
		keys := 1 + r.IntN(200) // from 1 on
		var f, kept flat[uint64, PortID]
		model, keptModel := map[uint64]PortID{}, map[uint64]PortID{}
		check := func(f *flat[uint64, PortID], model map[uint64]PortID) {
			t.Helper()
			if f.taken != len(model) || len(f.slots) > 0 && 2*f.taken > len(f.slots) {
				t.Fatalf("seed %d: %d of %d slots are taken, with %d keys", seed, f.taken, len(f.slots), len(model))
			}
			for k := uint64(1); k <= uint64(keys); k++ {
				got := f.get(hash(k), k)
				if want, there := model[k]; (got != nil) != there || there && *got != want {
					t.Fatalf("seed %d: %d is at %v, not %v %v", seed, k, got, want, there)
				}
			}
			if got := maps.Collect(f.each); !maps.Equal(got, model) {
				t.Fatalf("seed %d: each gives %v, not %v", seed, got, model)
			}
		}
		for i := range 600 {
			k := 1 + uint64(r.IntN(keys))
			if r.IntN(600) > i { // grows, then shrinks
				p := PortID(r.Uint32())
				f.put(k, p, hash)
				model[k] = p
			} else {
				f.remove(k, hash)
				delete(model, k)
			}
			if i == 300 {
				kept, keptModel = f, maps.Clone(model)
				f = f.clone()
			}
			if i%20 == 0 {
				check(&f, model)
			}
		}
		check(&f, model)
		check(&kept, keptModel)
	}
}

// TestHashesSpread: typical cluster addresses fill shards evenly, and lookups
// succeed in the first slots.
func TestHashesSpread(t *testing.T) {
	edit := EditIndex(&Index[PortID]{})
	for _, p := range NewStore(StoreOptions{}).Apply(cluster(30000, 0)).Ports {
		for d := range p.Destinations {
			edit.Put(d, p.ID)
		}
	}
	index := edit.Index()
	least, most, probes, keys := 1<<30, 0, 0, 0
	for i := range index.words[:shardsEach] {
		f := &index.words[i]
		least, most = min(least, f.taken), max(most, f.taken)
		mask := uint64(len(f.slots) - 1)
		for at := range f.slots {
			if s := &f.slots[at]; !s.free() {
				keys++
				probes += int((uint64(at)-hashWord(s.key))&mask) + 1
			}
		}
	}
	if keys != 60000 || least < 700 || most > 1200 {
		t.Errorf("%d keys, from %d to %d in a shard", keys, least, most)
	}
	if mean := float64(probes) / float64(keys); mean > 1.6 {
		t.Errorf("%.2f slots are looked at for each key", mean)
	}
}

// each calls f for all keys, in no order.
func (f *flat[K, V]) each(yield func(K, V) bool) {
	for i := range f.slots {
		if s := &f.slots[i]; !s.free() && !yield(s.key, s.value) {
			return
		}
	}
}
