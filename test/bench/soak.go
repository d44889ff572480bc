package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
)

// A soak is a number of bursts. After each of them the relay becomes idle and is
// measured.
const (
	soakBursts     = 24
	soakBurstLimit = 2 * time.Minute
)

// soakCloses lists how the connections of successive bursts end. A connection that
// the client closes first occupies one of the node's ports for a minute, so these
// are rarer.
var soakCloses = []load.Close{load.ServerCloses, load.ClientResets, load.ServerCloses, load.ClientCloses}

// soak opens and closes n connections and fails if the relay's memory and
// descriptors do not stay flat.
func (b *bench) soak(n uint64) error {
	s, err := b.openFirst()
	if err != nil {
		return err
	}
	defer s.close()
	fmt.Printf("soak of %s: %d connections in %d bursts, 32 clients\n\n", s.peer.Name, n, soakBursts)
	fmt.Printf("%12s %10s %8s %12s %12s %11s %9s %10s\n", "connections", "a second", "failed", "RSS KiB", "Go heap KiB", "descriptors", "threads", "goroutines")

	var total, failed uint64
	var samples []sample
	for burst := 0; total < n; burst++ {
		if burst > 4*soakBursts {
			return fmt.Errorf("soak: only %d connections after %d bursts", total, burst)
		}
		spec := load.Spec{
			Kind: load.Churn, Clients: 32, Sources: s.world.Clients, Close: soakCloses[burst%len(soakCloses)],
			MaxConns: min(n/soakBursts+1, n-total), Measure: soakBurstLimit, Warmup: time.Millisecond,
		}
		if spec.Close == load.ClientCloses {
			spec.MaxConns = min(spec.MaxConns, clientCloses)
		}
		r, err := s.load(spec)
		if err != nil {
			return err
		}
		total += r.Count
		for cause, n := range r.Errors {
			failed += n
			fmt.Fprintf(os.Stderr, "  %d connections failed: %s\n", n, cause)
		}
		h, err := s.holdings()
		if err != nil {
			return err
		}
		metrics := s.metrics()
		got := sample{h, int(metrics["go_goroutines"])}
		samples = append(samples, got)
		fmt.Printf("%12d %10.0f %8d %12d %12d %11d %9d %10d\n",
			total, r.Rate, failed, h.memory.RSS>>10, int(metrics[heapMetric])>>10, h.descriptors, h.threads, got.goroutines)
	}
	fmt.Println()
	verdict := flat(samples)
	if failed > 0 {
		verdict = errors.Join(verdict, fmt.Errorf("%d connections failed", failed))
	}
	if verdict == nil {
		fmt.Println("flat: descriptors, threads, goroutines and memory")
	}
	return verdict
}

// openFirst opens the stage of the first peer that can run.
func (b *bench) openFirst() (*stage, error) {
	peers, _ := b.prepare()
	if len(peers) == 0 {
		return nil, errors.New("the peer to watch cannot run here")
	}
	return b.openStage(peers[0], nil)
}

// sample is a relay's use of resources between two bursts.
type sample struct {
	holdings
	goroutines int // 0 if unknown
}

// flat compares the last third of the samples with the second one: by then a relay
// has what it needs for its work. Memory may vary by a tenth and 2 MiB, since Go
// frees it later; the rest by a handful.
func flat(samples []sample) error {
	third := len(samples) / 3
	if third == 0 {
		return errors.New("too few samples to tell")
	}
	early, late := samples[third:2*third], samples[len(samples)-third:]
	var errs []error
	for _, c := range []struct {
		what  string
		value func(sample) int64
		slack func(int64) int64
	}{
		{"descriptors", func(h sample) int64 { return int64(h.descriptors) }, func(int64) int64 { return 8 }},
		{"threads", func(h sample) int64 { return int64(h.threads) }, func(int64) int64 { return 4 }},
		{"goroutines", func(h sample) int64 { return int64(h.goroutines) }, func(int64) int64 { return 8 }},
		{"bytes of RSS", func(h sample) int64 { return h.memory.RSS }, func(v int64) int64 { return v/10 + 2<<20 }},
	} {
		before, after := middle(early, c.value), middle(late, c.value)
		if after > before+c.slack(before) {
			errs = append(errs, fmt.Errorf("not flat: from %d to %d %s", before, after, c.what))
		}
	}
	return errors.Join(errs...)
}

func middle(samples []sample, value func(sample) int64) int64 {
	var values []int64
	for _, h := range samples {
		values = append(values, value(h))
	}
	slices.Sort(values)
	return values[len(values)/2]
}
