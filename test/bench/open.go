package main

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/bench/load"
)

// The limits of a run with many open connections.
const (
	openFiles    = 20000 // limit of the relay's descriptors
	openBeyond   = 300   // connections that are tried above that limit
	openGiveBack = 1000  // connections that are closed at the limit
	openAgain    = 500   // connections that must work again afterwards
)

// openMany holds n connections at once, and opens more until the relay has no
// descriptor left. It checks whether the old connections suffer, and whether the
// relay recovers.
func (b *bench) openMany(n int) error {
	// The limit must be set before the relay starts, which may use it for its
	// plans.
	b.maxFiles = min(b.maxFiles, openFiles)
	limit := unix.Rlimit{Cur: uint64(b.maxFiles), Max: uint64(b.maxFiles)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("limit of descriptors: %w", err)
	}
	s, err := b.openFirst()
	if err != nil {
		return err
	}
	defer s.close()
	h, err := s.hold()
	if err != nil {
		return err
	}
	defer h.close()

	fmt.Printf("%d connections at once through %s, with at most %d descriptors\n\n", n, s.peer.Name, b.maxFiles)
	fmt.Printf("%-44s %6s %6s %10s %10s %10s %11s %9s\n", "", "good", "failed", "p50", "p99", "slowest", "descriptors", "RSS KiB")
	step := func(what string, c load.HoldCommand) (load.HoldReply, error) {
		reply, err := h.do(c)
		if err != nil {
			return reply, err
		}
		held, err := s.holdings()
		if err != nil {
			return reply, fmt.Errorf("%w: %w", err, s.relay.Failed())
		}
		failed := 0
		for _, n := range reply.Errors {
			failed += n
		}
		fmt.Printf("%-44s %6d %6d %10v %10v %10v %11d %9d\n", what, reply.Good, failed,
			reply.P50.Round(time.Microsecond), reply.P99.Round(time.Microsecond), reply.Max.Round(time.Microsecond),
			held.descriptors, held.memory.RSS>>10)
		for cause, n := range reply.Errors {
			fmt.Printf("    %d x %s\n", n, cause)
		}
		return reply, nil
	}

	opened, err := step("open", load.HoldCommand{Op: "open", N: n})
	if err != nil {
		return err
	}
	asked, err := step("a request on each", load.HoldCommand{Op: "ping"})
	if err != nil {
		return err
	}
	beyond := max(b.maxFiles/2-n, 0) + openBeyond
	more, err := step(fmt.Sprintf("open %d more, beyond the limit", beyond), load.HoldCommand{Op: "open", N: beyond, AtOnce: 100})
	if err != nil {
		return err
	}
	full, err := step("at the limit, a request on each", load.HoldCommand{Op: "ping"})
	if err != nil {
		return err
	}
	if _, err := step(fmt.Sprintf("close %d", openGiveBack), load.HoldCommand{Op: "close", N: openGiveBack}); err != nil {
		return err
	}
	time.Sleep(time.Second)
	again, err := step(fmt.Sprintf("open %d again", openAgain), load.HoldCommand{Op: "open", N: openAgain})
	if err != nil {
		return err
	}
	rest, err := step("a request on each", load.HoldCommand{Op: "ping"})
	if err != nil {
		return err
	}

	var errs []error
	if opened.Good != n || asked.Good != n {
		errs = append(errs, fmt.Errorf("of %d connections %d opened and %d answered", n, opened.Good, asked.Good))
	}
	if want := opened.Open + more.Good; full.Good < want {
		errs = append(errs, fmt.Errorf("at the limit %d of %d open connections answered", full.Good, want))
	}
	if again.Good != openAgain || rest.Good != again.Open {
		errs = append(errs, fmt.Errorf("after %d were closed, %d of %d new ones opened, and %d of %d answered", openGiveBack, again.Good, openAgain, rest.Good, again.Open))
	}
	if len(errs) == 0 {
		fmt.Println("\ngood: all open at once, none hurt at the limit, and new ones as soon as there was room")
	}
	return errors.Join(errs...)
}
