// Package capture writes the packets of connections that a filter names. A filter may
// match a connection only once it is accepted, or has ended: so packets wait in memory for
// a time before it is decided whether they belong to one.
package capture

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Bounds are what a capture may use.
type Bounds struct {
	Wait   time.Duration // how long a packet waits for its connection to match
	Memory int64         // bytes of packets that wait
	Size   int64         // of the file, in bytes
}

// Result says how a capture went.
type Result struct {
	Packets int  // written
	Early   int  // packets that were judged before their time, as memory was full
	Dropped int  // packets that the kernel dropped, as they were read too slowly
	Full    bool // the file has reached its size
}

// overhead is the memory of a packet beside its bytes.
const overhead = 160

// tick is how often the time of waiting packets is looked at while none come.
const tick = 100 * time.Millisecond

// errFull ends a capture.
var errFull = errors.New("the file is full")

// Capture is one capture. It is not safe for concurrent use.
type Capture struct {
	sniffer *sys.Sniffer
	flows   *Flows
	file    *File
	bounds  Bounds
	result  Result

	waiting []packet // from head on, by their times
	head    int
	bytes   int64 // memory of those
}

type packet struct {
	sys.Captured
	leg leg
}

// New returns a capture of the packets of flows.
func New(sniffer *sys.Sniffer, flows *Flows, file *File, bounds Bounds) *Capture {
	return &Capture{sniffer: sniffer, flows: flows, file: file, bounds: bounds}
}

// Run captures until ctx ends or the file is full. Then last has to add the connections
// that are not known yet, and the packets that wait are judged.
func (c *Capture) Run(ctx context.Context, last func() error) (Result, error) {
	err := c.receive(ctx)
	dropped, failed := c.sniffer.Dropped()
	c.result.Dropped = dropped
	if err == nil {
		if err = errors.Join(failed, last()); err == nil {
			err = c.judge(time.Time{})
		}
	}
	if errors.Is(err, errFull) {
		c.result.Full, err = true, nil
	}
	return c.result, err
}

func (c *Capture) receive(ctx context.Context) error {
	swept := time.Now()
	for ctx.Err() == nil {
		p, err := c.sniffer.Next(tick)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return err
		default:
			c.add(&p)
		}
		now := time.Now()
		if err := c.judge(now.Add(-c.bounds.Wait)); err != nil {
			return err
		}
		if now.Sub(swept) > time.Second {
			swept = now
			c.flows.forget(now.Add(-c.bounds.Wait - slack))
		}
	}
	return nil
}

// add has a packet wait, if it may be one of a connection. The node's own packets on lo
// are received again as others.
func (c *Capture) add(p *sys.Captured) {
	const loopback = 772 // ARPHRD_LOOPBACK
	l, ok := parse(p.Data)
	if !ok || p.Frame.Outgoing() && p.Frame.Hardware == loopback {
		return
	}
	kept := *p
	kept.Data = append([]byte(nil), p.Data...)
	c.waiting = append(c.waiting, packet{kept, l})
	for i := len(c.waiting) - 1; i > c.head && c.waiting[i-1].Time.After(kept.Time); i-- { // of two CPUs
		c.waiting[i], c.waiting[i-1] = c.waiting[i-1], c.waiting[i]
	}
	c.bytes += overhead + int64(len(kept.Data))
}

// judge writes, or forgets, the packets that came before a time, or all if it is zero, and
// those for which there is no memory.
func (c *Capture) judge(before time.Time) error {
	for c.head < len(c.waiting) {
		p := &c.waiting[c.head]
		full := c.bytes > c.bounds.Memory
		if !full && !before.IsZero() && p.Time.After(before) {
			break
		}
		if full {
			c.result.Early++
		}
		if c.flows.take(p.leg, p.Time) {
			if c.file.Written()+recordHeader+linkHeader+int64(len(p.Data)) > c.bounds.Size {
				return errFull
			}
			if err := c.file.Write(&p.Captured); err != nil {
				return err
			}
			c.result.Packets++
		}
		c.bytes -= overhead + int64(len(p.Data))
		*p = packet{}
		c.head++
	}
	if c.head > len(c.waiting)/2 {
		c.waiting = slices.Delete(c.waiting, 0, c.head)
		c.head = 0
	}
	return nil
}
