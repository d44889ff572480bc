package balancer

import (
	"net/netip"
	"sync/atomic"
	"time"
)

const (
	// firstSuspicion is how long an endpoint that failed is passed over. The
	// time doubles, up to longestSuspicion, with each connection that tries
	// the endpoint afterwards and fails.
	firstSuspicion   = 500 * time.Millisecond
	longestSuspicion = 16 * time.Second

	leastBuckets = 2
	mostBuckets  = 4096
)

// suspects remembers the endpoints of one service port that failed lately, for
// all connections and all loops, without a lock: a hash table of fixed size. With
// more failed endpoints in a bucket than it holds, some are forgotten, which costs
// attempts.
//
// When an endpoint's time is over, the first connection that picks it tries it,
// and the others go on to pass it over until that attempt is decided. So an
// endpoint that stays silent delays one connection in each period.
type suspects []bucket // a power of two

// bucket is a cache line. Each word holds an endpoint's tag, how often its time
// has doubled, and the moment when its time is over; 0 if it is free.
type bucket [8]atomic.Uint64

const (
	untilBits   = 40 // in units of 2^unitBits ns: 36 years
	unitBits    = 20
	doubledBits = 4
	untilMask   = 1<<untilBits - 1
	doubledMask = 1<<doubledBits - 1
	tagShift    = untilBits + doubledBits
)

// newSuspects makes a table for so many candidates: four to eight words for
// each.
func newSuspects(listBits uint8) *suspects {
	t := make(suspects, bucketsFor(listBits))
	return &t
}

// bucketsFor gives the number of buckets for a list of the given bit length.
func bucketsFor(listBits uint8) int {
	return min(max(1<<listBits/2, leastBuckets), mostBuckets)
}

// bucket gives the bucket of an endpoint, and its tag in the upper bits.
func (s suspects) bucket(key uint64) (b *bucket, tag uint64) {
	h := scramble(key ^ hashKeys[2])
	return &s[h&uint64(len(s)-1)], h >> tagShift << tagShift
}

// find gives an endpoint's word, and where it is; nil if there is none.
func (b *bucket) find(tag uint64) (at *atomic.Uint64, word uint64) {
	for i := range b {
		if word := b[i].Load(); word != 0 && word>>tagShift == tag>>tagShift {
			return &b[i], word
		}
	}
	return nil, 0
}

// room gives the place for one more endpoint: a free one, else that of the
// endpoint whose time is over first.
func (b *bucket) room() (at *atomic.Uint64, word uint64) {
	for i := range b {
		w := b[i].Load()
		if at == nil || w&untilMask < word&untilMask {
			at, word = &b[i], w
		}
	}
	return at, word
}

// suspicion gives the word of an endpoint whose time begins now.
func suspicion(tag, doubled uint64, now int64) uint64 {
	period := min(firstSuspicion<<doubled, longestSuspicion)
	return tag | doubled<<untilBits | uint64(now+int64(period))>>unitBits&untilMask
}

// isOver tells whether the time of a word's endpoint is over.
func isOver(word uint64, now int64) bool { return word&untilMask <= uint64(now)>>unitBits }

// suspected tells whether to pass over an endpoint for now.
func (b *Balancer) suspected(key uint64, now int64) bool {
	s := b.suspects.Load()
	if s == nil {
		return false
	}
	bucket, tag := s.bucket(key)
	at, word := bucket.find(tag)
	return at != nil && !isOver(word, now)
}

// take takes an endpoint for an attempt. It is false if the endpoint is to be
// passed over: it is suspected, or another connection is about to find out.
func (b *Balancer) take(key uint64, now int64) bool {
	s := b.suspects.Load()
	if s == nil {
		return true
	}
	bucket, tag := s.bucket(key)
	at, word := bucket.find(tag)
	if at == nil {
		return true
	}
	doubled := min(word>>untilBits&doubledMask+1, doubledMask)
	return isOver(word, now) && at.CompareAndSwap(word, suspicion(tag, doubled, now))
}

// suspect remembers that an endpoint failed. If it is suspected already, its
// time goes on as it is: many connections that fail at once count as one.
func (b *Balancer) suspect(ep netip.AddrPort, listBits uint8, now int64) {
	s := b.suspects.Load()
	if s == nil || len(*s) < bucketsFor(listBits) {
		b.suspects.CompareAndSwap(s, newSuspects(listBits))
		s = b.suspects.Load()
	}
	bucket, tag := s.bucket(endpointKey(ep))
	at, word := bucket.find(tag)
	if at == nil {
		at, word = bucket.room()
	} else if !isOver(word, now) {
		return
	}
	at.CompareAndSwap(word, suspicion(tag, 0, now))
}

// clear forgets what is held against an endpoint that answered.
func (b *Balancer) clear(ep netip.AddrPort) {
	s := b.suspects.Load()
	if s == nil {
		return
	}
	bucket, tag := s.bucket(endpointKey(ep))
	if at, word := bucket.find(tag); at != nil {
		at.CompareAndSwap(word, 0)
	}
}
