package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// step is one scene of the story.
type step struct {
	title  string
	do     string // what is done
	expect string
	play   func(ctx context.Context, o *outcome)
}

// outcome is what came of a step. It held if nothing is wrong.
type outcome struct {
	seen  []string
	wrong []error
	log   []*record // those worth showing
	total int       // records of the step
}

func (o *outcome) sawf(format string, args ...any) {
	o.seen = append(o.seen, fmt.Sprintf(format, args...))
}

func (o *outcome) wrongf(format string, args ...any) {
	o.wrong = append(o.wrong, fmt.Errorf(format, args...))
}

func (o *outcome) check(err error) {
	if err != nil {
		o.wrong = append(o.wrong, err)
	}
}

// play plays the story and returns ErrFailed if a step did not hold. Its last line is
// the tally. With Once it stops the proxy before that, so that the log is complete.
func (s *show) play(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, storyPatience, fmt.Errorf("the whole story took more than %v", storyPatience))
	defer cancel()
	held := true
	for i, st := range s.story() {
		s.out.line("")
		s.out.line("%s", s.out.in(bold, fmt.Sprintf("%d. %s", i+1, st.title)))
		s.out.labelled("do", plain, st.do, " ")
		s.out.labelled("expect", plain, st.expect, " ")
		var o outcome
		st.play(ctx, &o)
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return context.Canceled
		}
		gone := s.proxy.gone()
		if gone {
			o.wrongf("the proxy: %w", s.proxy.ended())
		}
		held = s.report(&o) && held
		if gone {
			break
		}
	}
	return s.end(held)
}

// report shows what came of a step.
func (s *show) report(o *outcome) bool {
	s.out.checked("seen", len(o.wrong) == 0, strings.Join(o.seen, "; "))
	s.wrong(o.wrong...)
	label := "log"
	for _, r := range o.log {
		s.out.record(label, r.console())
		label = ""
	}
	if more := o.total - len(o.log); more > 0 && len(o.log) > 0 {
		s.out.record("", fmt.Sprintf("… and %d more", more))
	}
	return len(o.wrong) == 0
}

// wrong shows errors.
func (s *show) wrong(list ...error) {
	for _, err := range list {
		for line := range strings.Lines(err.Error()) {
			s.out.labelled("wrong", red, strings.TrimSpace(line), " ")
		}
	}
}

// end checks the log as a whole and adds up. It gives ErrFailed unless
// everything held.
func (s *show) end(held bool) error {
	var all []error
	if s.options.Once {
		all = append(all, s.proxy.stop())
	}
	all = append(all, s.proxy.journal.audit(s.ledger.keys()))
	t := s.ledger.tally(s.proxy.journal.retried)
	err := errors.Join(all...)
	s.out.line("")
	s.out.line("%s", s.out.in(bold, "The log as a whole"))
	s.out.labelled("expect", plain, "one record for each connection, none for the connects that were refused", " ")
	s.out.checked("seen", err == nil, fmt.Sprintf("%d connections, %d refused connects, %d records", t.connections, t.refused, s.proxy.journal.size()))
	if err != nil {
		held = false
		s.wrong(err)
	}
	if !held {
		s.proxySaid()
	}
	s.out.line("")
	s.out.line("demo: %d connections, %d answered, %d retried, %d failed", t.connections, t.answered, t.retried, t.failed)
	if !held {
		return ErrFailed
	}
	return nil
}

// compare checks that each of the connections was answered and has exactly one
// record, which says what its client saw, and returns the records. The records
// of connections that failed are left out.
func (s *show) compare(ctx context.Context, o *outcome, visits []*visit) []*record {
	for _, v := range visits {
		if v.err != nil {
			o.wrongf("%s to %s: %w", caller(v.client), v.vip, v.err)
		}
	}
	connected := slices.DeleteFunc(slices.Clone(visits), func(v *visit) bool { return !v.connected() })
	records, err := s.proxy.journal.recordsOf(ctx, keysOf(connected), recordPatience)
	if err != nil {
		o.check(err)
		return nil
	}
	for i, v := range connected {
		if v.err == nil {
			o.check(agree(v, records[i]))
		}
	}
	o.total += len(records)
	return records
}

// recordPatience bounds the time from a connection's end to its record.
const recordPatience = 15 * time.Second

// agree returns an error if the record differs from what the client saw.
func agree(v *visit, r *record) error {
	for _, c := range []struct {
		field     string
		got, want any
	}{
		{"service", r.Service, v.service.String() + ":http"},
		{"pod", r.Pod, manifestNamespace + "/" + v.answer},
		{"bytes_from_client", r.BytesFromClient, v.sent},
		{"bytes_from_endpoint", r.BytesFromEndpoint, v.received},
		{"end", r.End, "client_fin"},
	} {
		if c.got != c.want {
			return fmt.Errorf("record of %s to %s: %s is %v, the client saw %v", v.from, v.vip, c.field, c.got, c.want)
		}
	}
	return nil
}

// counts says how often each backend answered: "ash 4, birch 4".
func counts(visits []*visit) string {
	n := map[string]int{}
	for _, v := range visits {
		if v.err == nil {
			n[v.answer]++
		}
	}
	var list []string
	for _, name := range backendNames {
		if n[name] > 0 {
			list = append(list, fmt.Sprintf("%s %d", name, n[name]))
		}
	}
	if len(list) == 0 {
		return "no answer"
	}
	return strings.Join(list, ", ")
}

// caller names a client.
func caller(i int) string {
	if i < 0 {
		return "the node"
	}
	return fmt.Sprintf("client %d", i+1)
}

// slowest returns the longest time that a client waited for its answer.
func slowest(visits []*visit) time.Duration {
	var most time.Duration
	for _, v := range visits {
		most = max(most, v.took)
	}
	return most
}

// until tries, every few milliseconds, until the trial gives true or an error.
func until(ctx context.Context, within time.Duration, trial func() (bool, error)) error {
	deadline, tick := time.After(within), time.Tick(10*time.Millisecond)
	for {
		if done, err := trial(); done || err != nil {
			return err
		}
		select {
		case <-tick:
		case <-deadline:
			return fmt.Errorf("not within %v", within)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
