package conntrack

import (
	"context"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

// remindPause is how long Remind waits while the sink is behind.
const remindPause = 5 * time.Millisecond

// Remind queues a Lasts record of each connection that has had its endpoint for an
// interval, or whose last Lasts record is an interval old. It interrupts the loops for a
// few records at a time, and waits for a slow sink rather than fill its queue. Call it
// more often than each interval.
func (t *Table) Remind(ctx context.Context, post Post, interval time.Duration) error {
	if t.queue == nil {
		return nil
	}
	behind := func() bool { return t.queue.length() > t.queue.limit/2 }
	return t.walk(ctx, post, walking{
		step: func(l *lister) bool {
			if behind() {
				return l.stay()
			}
			return l.remindNext(int64(interval))
		},
		parkedStep: func(l *lister) bool {
			if behind() {
				l.copies = append(l.copies[:0], Record{})
				return true
			}
			return l.remindParked(int64(interval))
		},
	}, func(r *Record) error {
		if r.ID != 0 {
			return nil
		}
		select { // the queue is half full
		case <-time.After(remindPause):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// stay does nothing in this step, and leaves an empty copy to say so.
func (l *lister) stay() (more bool) {
	r := l.begin()
	l.copies = append(l.copies, Record{})
	return l.end(r)
}

// remindNext queues the Lasts records that are due among the next connections.
func (l *lister) remindNext(interval int64) (more bool) {
	r, now := l.begin(), poll.Nanotime()
	for n := 0; r != &l.shard.list && n < listStep; r, n = r.next, n+1 {
		if r.state == recordOpen && r.State() == Open && now-r.attemptStart >= interval {
			r.attemptStart = now
			l.shard.tell(r, Lasts, now)
		}
	}
	return l.end(r)
}

// remindParked is remindNext for parked connections. They are all open.
func (l *lister) remindParked(interval int64) (more bool) {
	now := poll.Nanotime()
	return l.eachParked(listStep, listStep, func(p *Parked) bool {
		if now-p.announced >= interval {
			p.announced = now
			p.with(l.shard, func(r *Record) { l.shard.tell(r, Lasts, now) })
		}
		return true
	})
}
