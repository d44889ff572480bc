package balancer

import (
	"net/netip"
	"sync/atomic"
	"time"
)

const (
	// firstSuspicion is how long connections skip an endpoint after its first
	// failure. Each further failed attempt doubles the time, up to
	// longestSuspicion.
	firstSuspicion   = 500 * time.Millisecond
	longestSuspicion = 16 * time.Second

	// Distrust is how long after a failure an endpoint may be suspected, if connections
	// go on to find out.
	Distrust = longestSuspicion + 4*time.Second

	leastBuckets = 2
	mostBuckets  = 4096
)

// suspects holds the recently failed endpoints of one service port, for all
// connections and loops. It is a lock-free hash table of fixed size. If a bucket
// overflows, the table forgets an endpoint, which costs extra attempts.
//
// When an endpoint's period ends, the first connection that picks it tries it.
// The others skip it until that attempt has a result. So an endpoint that drops
// packets delays one connection in each period.
type suspects []bucket // a power of two

// bucket is one cache line. Each word holds an endpoint's tag, how often its
// period has doubled, and the end of the period. A free word is 0.
type bucket [8]atomic.Uint64

const (
	untilBits   = 40 // in units of 2^unitBits ns: 36 years
	unitBits    = 20
	doubledBits = 4
	untilMask   = 1<<untilBits - 1
	doubledMask = 1<<doubledBits - 1
	tagShift    = untilBits + doubledBits
)

// bucketsFor returns the number of buckets for a list whose number of candidates has the
// given bit length: so many that there are four to eight words for each.
func bucketsFor(listBits uint8) int {
	return min(max(1<<listBits/2, leastBuckets), mostBuckets)
}

// bucket returns the endpoint's bucket, and its tag in the upper bits of a word.
func (s suspects) bucket(key uint64) (b *bucket, tag uint64) {
	h := scramble(key ^ hashKeys[2])
	return &s[h&uint64(len(s)-1)], h >> tagShift << tagShift
}

// find returns an endpoint's word and its location, or nil if there is none.
func (b *bucket) find(tag uint64) (at *atomic.Uint64, word uint64) {
	for i := range b {
		if word := b[i].Load(); word != 0 && word>>tagShift == tag>>tagShift {
			return &b[i], word
		}
	}
	return nil, 0
}

// victim returns a free word, or else the word whose period ends first.
func (b *bucket) victim() (at *atomic.Uint64, word uint64) {
	for i := range b {
		w := b[i].Load()
		if at == nil || w&untilMask < word&untilMask {
			at, word = &b[i], w
		}
	}
	return at, word
}

// suspicion returns the word of an endpoint whose period begins now.
func suspicion(tag, doubled uint64, now int64) uint64 {
	period := min(firstSuspicion<<doubled, longestSuspicion)
	return tag | doubled<<untilBits | uint64(now+int64(period))>>unitBits&untilMask
}

// isOver reports whether the period of a word has ended.
func isOver(word uint64, now int64) bool { return word&untilMask <= uint64(now)>>unitBits }

// suspected reports whether to skip an endpoint for now.
func (b *Balancer) suspected(key uint64, now int64) bool {
	s := b.suspects.Load()
	if s == nil {
		return false
	}
	bucket, tag := s.bucket(key)
	at, word := bucket.find(tag)
	return at != nil && !isOver(word, now)
}

// take reserves an endpoint for an attempt. It returns false if the connection
// must skip the endpoint: it is suspected, or another connection is trying it.
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

// suspect records that an endpoint failed. It does not extend a running period, so
// many simultaneous failures count as one.
func (b *Balancer) suspect(ep netip.AddrPort, listBits uint8, now int64) {
	bucket, tag := b.suspectsFor(listBits).bucket(endpointKey(ep))
	at, word := bucket.find(tag)
	if at == nil {
		at, word = bucket.victim()
	} else if !isOver(word, now) {
		return
	}
	at.CompareAndSwap(word, suspicion(tag, 0, now))
}

// suspectUntil records a suspicion of another process, unless the endpoint has failed here.
func (b *Balancer) suspectUntil(ep netip.AddrPort, listBits uint8, doubled uint64, until int64) {
	bucket, tag := b.suspectsFor(listBits).bucket(endpointKey(ep))
	if at, _ := bucket.find(tag); at == nil {
		at, word := bucket.victim()
		at.CompareAndSwap(word, tag|doubled<<untilBits|uint64(max(until, 0))>>unitBits&untilMask)
	}
}

// suspectsFor returns the table, large enough for a list.
func (b *Balancer) suspectsFor(listBits uint8) suspects {
	s := b.suspects.Load()
	if s == nil || len(*s) < bucketsFor(listBits) {
		larger := make(suspects, bucketsFor(listBits))
		b.suspects.CompareAndSwap(s, &larger)
		s = b.suspects.Load()
	}
	return *s
}

// clear removes an endpoint that answered.
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
