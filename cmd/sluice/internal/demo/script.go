package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// shopServices are the Services of the story, in its order.
func shopServices() []*shopService {
	return []*shopService{{"web", 10}, {"cart", 20}, {"search", 30}, {"soon", 40}}
}

// changePatience bounds the time from a change of a manifest to its effect,
// which is promised within 100 ms, on a machine that does nothing else.
const changePatience = 15 * time.Second

// retryPatience bounds the time to an answer: the proxy's first four attempts
// take no longer than this, whatever happens.
const retryPatience = 3750 * time.Millisecond

// theNode stands for a program on the node itself where a client is wanted.
const theNode = -1

// story returns the steps, which run in order, as later ones change manifests.
func (s *show) story() []step {
	second := s.world.second()
	web, cart, search, soon := s.services[0], s.services[1], s.services[2], s.services[3]
	return []step{
		{
			title:  fmt.Sprintf("Connections are spread over the endpoints (%s)", web),
			do:     fmt.Sprintf("6 connections from a client pod to %s, 3 to %s, 3 from the node itself", web.vip(v4), web.vip(second)),
			expect: "ash, birch and cedar answer 4 times each; one record for each connection",
			play:   func(ctx context.Context, o *outcome) { s.playSpread(ctx, o, web) },
		},
		{
			title:  fmt.Sprintf("A client stays with its endpoint (%s, sessionAffinity: ClientIP)", cart),
			do:     fmt.Sprintf("3 connections from each of %d client pods to %s, the last pod's to %s", clientCount, cart.vip(v4), cart.vip(second)),
			expect: "each pod always has the same answer, not all pods the same; affinity is new, then hit",
			play:   func(ctx context.Context, o *outcome) { s.playAffinity(ctx, o, cart) },
		},
		{
			title:  fmt.Sprintf("A dead endpoint that no client notices (%s)", search),
			do:     fmt.Sprintf("12 connections from client pods to %s, which ash, dogwood and elm serve; dogwood's port is closed", search.vip(v4)),
			expect: "ash and elm answer all of them; the log shows who met dogwood and was sent on",
			play:   func(ctx context.Context, o *outcome) { s.playDead(ctx, o, search) },
		},
		{
			title:  fmt.Sprintf("Endpoints come and go while connections run (%s)", web),
			do:     fmt.Sprintf("%d connections, one of them to %s, reach ash, birch and cedar and are held open; then %s takes birch out and puts elm in; then come 6 new connections", clientCount, web.vip(second), web.file()),
			expect: "the new ones reach ash, cedar and elm, never birch; the held ones live on, birch's too",
			play:   func(ctx context.Context, o *outcome) { s.playChange(ctx, o, web) },
		},
		{
			title:  fmt.Sprintf("A port with no endpoints refuses, until it has one (%s)", soon),
			do:     fmt.Sprintf("connects to %s and %s, from a client pod and from the node; then %s gets its first endpoint, elm", soon.vip(v4), soon.vip(second), soon.file()),
			expect: "connection refused at once, and no record, for no connection was made; then elm answers",
			play:   func(ctx context.Context, o *outcome) { s.playRefuse(ctx, o, soon) },
		},
	}
}

// familyOf is IPv4 for all client pods but the last.
func (s *show) familyOf(client int) service.Family {
	if client == clientCount-1 {
		return s.world.second()
	}
	return v4
}

func (s *show) playSpread(ctx context.Context, o *outcome, svc *shopService) {
	visits := s.visits(ctx, 6, 0, svc, v4)
	visits = append(visits, s.visits(ctx, 3, 0, svc, s.world.second())...)
	visits = append(visits, s.visits(ctx, 3, theNode, svc, v4)...)
	records := s.compare(ctx, o, visits)
	o.sawf("%s", counts(visits))
	o.sawf("%d records", len(records))
	if got, want := counts(visits), "ash 4, birch 4, cedar 4"; got != want {
		o.wrongf("answers: %s, want %s", got, want)
	}
	for _, r := range records {
		if r.Attempts != 1 || r.Affinity != "none" {
			o.wrongf("record of %s: attempts %d, affinity %s, want 1, none", r.Client, r.Attempts, r.Affinity)
		}
	}
	if len(records) == len(visits) {
		o.log = []*record{records[0], records[6]}
	}
}

func (s *show) playAffinity(ctx context.Context, o *outcome, svc *shopService) {
	answers := map[string]bool{}
	for i := range clientCount {
		visits := s.visits(ctx, 3, i, svc, s.familyOf(i))
		records := s.compare(ctx, o, visits)
		o.sawf("%s: %s", caller(i), counts(visits))
		for j, v := range visits {
			answers[v.answer] = true
			if v.answer != visits[0].answer {
				o.wrongf("%s: %s answered after %s", caller(i), v.answer, visits[0].answer)
			}
			want := "hit"
			if j == 0 {
				want = "new"
			}
			if j < len(records) && records[j].Affinity != want {
				o.wrongf("record %d of %s: affinity %s, want %s", j+1, caller(i), records[j].Affinity, want)
			}
		}
		if i == 0 {
			o.log = append(o.log, records[:min(2, len(records))]...)
		}
	}
	if len(answers) < 2 {
		o.wrongf("all client pods have the same answer")
	}
}

func (s *show) playDead(ctx context.Context, o *outcome, svc *shopService) {
	var visits []*visit
	for i := range 12 {
		visits = append(visits, s.visit(ctx, i%clientCount, svc, v4))
	}
	records := s.compare(ctx, o, visits)
	retried := 0
	for _, r := range records {
		if !r.retried() {
			continue
		}
		if retried++; retried <= 2 {
			o.log = append(o.log, r)
		}
		for _, f := range r.Failed {
			if f.Pod != manifestNamespace+"/"+deadBackend || f.Error != "refused" {
				o.wrongf("record of %s: attempt at %s failed with %q, want %s, refused", r.Client, f.Pod, f.Error, deadBackend)
			}
		}
	}
	o.sawf("%s", counts(visits))
	o.sawf("%d of %d met %s and were sent on", retried, len(visits), deadBackend)
	o.sawf("the slowest answer took %v", slowest(visits).Round(100*time.Microsecond))
	if retried == 0 {
		o.wrongf("no record has an attempt at %s", deadBackend)
	}
	if most := slowest(visits); most > retryPatience {
		o.wrongf("an answer took %v, want at most %v", most, retryPatience)
	}
}

func (s *show) playChange(ctx context.Context, o *outcome, svc *shopService) {
	var held []*call
	var all []*visit
	for i := range clientCount {
		c := s.call(ctx, i, svc, s.familyOf(i))
		defer c.hangUp()
		_, _ = c.ask() // the visit has the error
		held, all = append(held, c), append(all, c.visit)
	}

	changed := time.Now()
	if err := s.manifests.change(svc); err != nil {
		o.check(err)
		return
	}
	var last *visit
	err := until(ctx, changePatience, func() (bool, error) {
		last = s.visit(ctx, 3, svc, v4)
		all = append(all, last)
		return last.answer == "elm", last.err
	})
	if err != nil {
		o.wrongf("elm, which is new, answers: %w", err)
	}
	effect := time.Since(changed)

	fresh := s.visits(ctx, 6, 3, svc, v4)
	all = append(all, fresh...)
	o.sawf("new: %s, %v after the change", counts(fresh), effect.Round(time.Millisecond))
	if got, want := counts(fresh), "ash 2, cedar 2, elm 2"; got != want {
		o.wrongf("new connections: %s, want %s", got, want)
	}

	alive := 0
	for _, c := range held {
		before := c.visit.answer
		if now, err := c.ask(); err == nil && now == before {
			alive++
		} else if err == nil {
			o.wrongf("the held connection to %s was answered by %s", before, now)
		}
		c.hangUp()
	}
	o.sawf("held: %d of %d go on", alive, len(held))
	if !slices.ContainsFunc(held, func(c *call) bool { return c.visit.answer == "birch" }) {
		o.wrongf("no held connection had reached birch")
	}
	if records := s.compare(ctx, o, all); len(records) == len(all) {
		for i, v := range all {
			if i < len(held) && v.answer == "birch" || v == last {
				o.log = append(o.log, records[i])
			}
		}
	}
}

func (s *show) playRefuse(ctx context.Context, o *outcome, svc *shopService) {
	var most time.Duration
	refused := 0
	for _, who := range []struct {
		client int
		family service.Family
	}{{0, v4}, {1, s.world.second()}, {theNode, v4}} {
		began := time.Now()
		c, err := s.dial(ctx, who.client, svc, who.family)
		switch {
		case errors.Is(err, errRefused):
			s.ledger.refused++
			refused++
			most = max(most, time.Since(began))
			continue
		case err == nil:
			c.visit.err = errors.New("connected, although the port has no endpoints")
			c.hangUp()
		}
		o.wrongf("%s to %s: %w", caller(who.client), c.visit.vip, c.visit.err)
	}
	o.sawf("%d of 3 refused, within %v", refused, most.Round(100*time.Microsecond))

	changed := time.Now()
	if err := s.manifests.change(svc); err != nil {
		o.check(err)
		return
	}
	var all []*visit
	err := until(ctx, changePatience, func() (bool, error) {
		c, err := s.dial(ctx, 2, svc, v4)
		if errors.Is(err, errRefused) {
			s.ledger.refused++
			return false, nil
		}
		defer c.hangUp()
		all = append(all, c.visit)
		_, err = c.ask()
		return true, err
	})
	if err != nil {
		o.wrongf("elm, which is new, answers: %w", err)
	}
	effect := time.Since(changed)
	o.log = s.compare(ctx, o, all)
	o.sawf("%s, %v after the change", counts(all), effect.Round(time.Millisecond))
	if got, want := counts(all), "elm 1"; got != want {
		o.wrongf("answers: %s, want %s", got, want)
	}
}
