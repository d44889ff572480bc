package steering

import (
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// refusals expects that what is refused or dropped is counted, with its client and reason, and
// reported once.
func refusals(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	counter, counts := s.steer.(redirect.Counter)
	if counts == m.Uncounted {
		t.Fatalf("the mode counts: %v", counts)
	}
	if !counts {
		return
	}
	web := both(service.TCP, "10.96.0.10", "fd01::10", 80)
	none, quiet := all("10.96.0.11", "fd01::11", 80), all("10.96.0.12", "fd01::12", 80)
	s.apply(t, Plan(Steer(s.front, web...), Refuse(none...), Silent(quiet...)))
	s.fromEverywhere(t, "served", served, web...)
	s.refusal(t, counter, redirect.NoEndpoints, Refused, none)
	s.refusal(t, counter, redirect.NoLocalEndpoints, Silence, quiet)
	s.refusal(t, counter, redirect.UnknownPort, Refused, all("10.96.0.10", "fd01::10", 81))
	s.refusal(t, counter, redirect.UnknownAddress, Silence, all("10.96.77.77", "fd01::7777", 80))
	if m.NonLocalUncounted {
		return
	}
	foreign := all("192.0.2.10", "2001:db8::10", 80)
	dropped := all("192.0.2.10", "2001:db8::10", 81)
	if m.NonLocalSilent {
		foreign = foreign[1:2] // TCP to IPv4 finds no socket, nor asks the program
	}
	s.apply(t, Plan(Refuse(foreign...), Silent(dropped...)))
	s.refusal(t, counter, redirect.NoEndpoints, Refused, foreign)
	s.refusal(t, counter, redirect.NoLocalEndpoints, Silence, dropped)
}

// refusal checks the report about a client's attempts.
func (s *stage) refusal(t *testing.T, counter redirect.Counter, reason redirect.Reason, answer string, ds []service.Destination) {
	t.Helper()
	before := must.Get(counter.Refused())(t)
	for _, d := range ds {
		Expect(t, s.Client, d, answer)
	}
	told := must.Get(counter.Refused())(t)
	all := before.Totals
	missing := make(map[service.Destination]netip.Addr, len(ds))
	for _, d := range ds {
		missing[d] = s.Client.IPv4
		if d.Addr.Is6() {
			missing[d] = s.Client.IPv6
		}
	}
	for _, r := range told.New {
		if r.Client != missing[r.Destination] || r.Reason != reason || r.Packets == 0 {
			t.Errorf("reason %d: told %+v", reason, r)
		}
		delete(missing, r.Destination)
		all[r.Reason] += r.Packets
	}
	for d := range missing {
		t.Errorf("reason %d: %s is not told", reason, d)
	}
	check.Equalf(t, told.Totals, all, "reason %d: the totals, and those by client", reason)
	if again, err := counter.Refused(); len(again.New) > 0 || again.Totals != told.Totals || err != nil {
		t.Errorf("reason %d: told again: %+v, %v", reason, again, err)
	}
}
