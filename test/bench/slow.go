package main

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
)

// The slow readers of a slow-reader run.
const (
	slowStreams = 8        // in each direction
	slowRate    = 64 << 10 // bytes a second that each reads
	slowRest    = 32 << 20 // bytes that each reads at full speed at the end
	slowGrowth  = 16 << 20 // bytes by which the relay's memory may grow
)

// patternOrder is the pattern role's input: all streams at once.
type patternOrder struct {
	Target netip.Addr
	Spec   load.PatternSpec // every second one is an upload
	Count  int
	Limit  time.Duration
}

// patternResult is the result.
type patternResult struct {
	Bytes  uint64 // that arrived, each checked
	Errors []string
}

// runPatterns is the pattern role.
func runPatterns(o patternOrder) (patternResult, error) {
	var (
		mu     sync.Mutex
		wg     sync.WaitGroup
		result patternResult
	)
	for i := range o.Count {
		spec := o.Spec
		spec.Upload = i%2 == 1
		wg.Go(func() {
			n, err := load.RunPattern(o.Target, spec, o.Limit)
			mu.Lock()
			defer mu.Unlock()
			result.Bytes += n
			if err != nil {
				result.Errors = append(result.Errors, err.Error())
			}
		})
	}
	wg.Wait()
	return result, nil
}

// slowReader connects writers that never stop with very slow readers, and watches
// the relay's memory. At the end the readers catch up, and every byte is checked.
func (b *bench) slowReader(length time.Duration) error {
	s, err := b.openFirst()
	if err != nil {
		return err
	}
	defer s.close()
	spec := load.PatternSpec{Rate: slowRate, Slow: length}
	spec.Size = (uint64(length.Seconds()*slowRate) + slowRest) &^ 7
	order := patternOrder{
		Target: s.relay.Targets[0], Spec: spec,
		Count: 2 * slowStreams, Limit: length + 2*time.Minute,
	}
	fmt.Printf("slow readers behind %s for %v: %d downloads and %d uploads, each read at %d KiB/s\n\n", s.peer.Name, length, slowStreams, slowStreams, slowRate>>10)
	before, err := s.holdings()
	if err != nil {
		return err
	}
	var result patternResult
	done := make(chan error, 1)
	go func() { done <- s.role(patternRole, order, &result, order.Limit+10*time.Second) }()

	fmt.Printf("%8s %12s %12s %11s\n", "after", "RSS KiB", "more KiB", "descriptors")
	begin := time.Now()
	most := before.memory.RSS
	tick := time.NewTicker(max(length/12, time.Second))
	defer tick.Stop()
	for ended := false; !ended; {
		select {
		case err := <-done:
			if err != nil {
				return err
			}
			ended = true
		case <-tick.C:
		}
		h, err := s.holdings()
		if err != nil {
			return err
		}
		most = max(most, h.memory.RSS)
		fmt.Printf("%8v %12d %12d %11d\n", time.Since(begin).Round(time.Second), h.memory.RSS>>10, (h.memory.RSS-before.memory.RSS)>>10, h.descriptors)
	}
	for _, e := range result.Errors {
		fmt.Println("stream:", e)
	}
	grown := most - before.memory.RSS
	fmt.Printf("\n%d bytes arrived, each in its place; the relay's own memory grew by at most %d KiB\n", result.Bytes, grown>>10)
	if len(result.Errors) > 0 {
		return fmt.Errorf("%d of %d streams failed", len(result.Errors), order.Count)
	}
	if grown > slowGrowth {
		return fmt.Errorf("the relay's memory grew by %d bytes, more than %d", grown, slowGrowth)
	}
	return nil
}
