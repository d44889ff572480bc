package conntrack

import (
	"math/rand/v2"
	"testing"
)

// refreshed counts how often its connection was brought up to date.
type refreshed struct{ times int }

func (c *refreshed) Refresh(*Record) { c.times++ }

// While connections come and go, a round of Refresh sees each that stays exactly
// once, a few at a time.
func TestRefreshInShares(t *testing.T) {
	const share = 16
	s := NewTable(Options{}).Shard(0)
	r := rand.New(rand.NewPCG(1, 1))
	var stay, others []*Record
	open := func(list *[]*Record) {
		rec := &Record{Owner: new(refreshed)}
		s.Open(rec)
		*list = append(*list, rec)
	}
	times := func(list []*Record) (sum int) {
		for _, rec := range list {
			if c, ok := rec.Owner.(*refreshed); ok {
				sum += c.times
			}
		}
		return sum
	}
	for range 300 {
		open(&stay)
		open(&others)
	}
	for round := 1; round <= 3; round++ {
		for more := true; more; {
			before := times(stay) + times(others)
			more = s.Refresh(share)
			if n := times(stay) + times(others) - before; n > share || more && n < share {
				t.Fatalf("%d at once, more to come: %t", n, more)
			}
			for range 8 {
				if i := r.IntN(len(others)); others[i].Owner != nil {
					s.Close(others[i])
				}
				open(&others)
			}
		}
		for i, rec := range stay {
			if got := rec.Owner.(*refreshed).times; got != round {
				t.Fatalf("round %d: connection %d was refreshed %d times", round, i, got)
			}
		}
	}
	s.Refresh(share)
	closeAll(s, func(*Record) {})
	if s.Refresh(share) || s.count != 0 {
		t.Error("there is more when all are closed")
	}
}
