package policy_test

import (
	"flag"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/slowpolicy"
)

var worlds = flag.Uint64("worlds", 250, "how many random clusters the tests go through")

var protocols = map[string]service.Protocol{"TCP": service.TCP, "UDP": service.UDP, "SCTP": service.SCTP}

// say converts a verdict to the form of the second implementation's answers.
func say(v policy.Verdict) slowpolicy.Answer {
	a := slowpolicy.Answer{Verdict: v.Action.String(), Rule: v.Rule.String()}
	if v.Kind != 0 {
		a.Address = v.Kind.String()
	}
	if v.Port != nil {
		a.Service = v.Port.Name.String()
	}
	if v.Action == policy.Accept {
		a.Source, a.SourceRule = v.Source.String(), v.SourceRule.String()
	}
	for _, e := range v.Candidates {
		a.Candidates = append(a.Candidates, e.Addr.String())
	}
	return a
}

// TestResolveAgrees compares Resolve with the second implementation of the rules
// for random clusters, clients and destinations. The test of package explain
// compares many more, in the words of sluice explain.
func TestResolveAgrees(t *testing.T) {
	const questions = 400
	seen := map[string]int{}
	for seed := range *worlds {
		r := rand.New(rand.NewPCG(2, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		for range questions {
			protocol, client, to := c.Question(r)
			got, want := say(table.Resolve(protocols[protocol], client, to)), c.Resolve(protocol, client, to)
			want.Policy, want.Affinity = "", "" // of the service, not of the verdict
			if len(want.Candidates) == 0 {
				want.Candidates = nil
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d: %s from %s to %s\ngot  %+v\nwant %+v\nin %+v", seed, protocol, client, to, got, want, c)
			}
			seen[got.Verdict+" "+got.Rule]++
		}
	}
	for _, outcome := range []string{"accept A3.2", "accept A3.3", "accept A3.6", "refuse A3.4", "drop A3.5", "drop A3.10", "refuse A3.12", "drop A3.12", "none A3.13", "none A1.1"} {
		if seen[outcome] == 0 {
			t.Errorf("no case ended in %q", outcome)
		}
	}
	t.Logf("%v", seen)
}

// TestAdmission: in random clusters, a client is dropped if and only if Admission
// does not allow it (A3.5, A3.6, A3.10, A3.11). The second implementation of the
// rules decides who is dropped.
func TestAdmission(t *testing.T) {
	const questions = 400
	limitedBy := map[string]int{}
	for seed := range *worlds {
		r := rand.New(rand.NewPCG(7, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		for range questions {
			protocol, client, to := c.Question(r)
			d := service.Destination{Addr: to.Addr(), Port: to.Port(), Protocol: protocols[protocol]}
			allowed, limited := table.Admission(d)
			inside := slices.ContainsFunc(allowed, func(p netip.Prefix) bool { return p.Contains(client) })
			want := c.Resolve(protocol, client, to)
			if (want.Verdict == "drop") != (limited && !inside) {
				t.Fatalf("seed %d: %s from %s to %s is %s %s, but admission says %v, %v", seed, protocol, client, to, want.Verdict, want.Rule, allowed, limited)
			}
			if !limited && len(allowed) > 0 {
				t.Fatalf("seed %d: %s to %s: not limited, but to %v", seed, protocol, to, allowed)
			}
			for i, p := range allowed {
				if p != p.Masked() || p.Addr().Is4() != to.Addr().Is4() || i > 0 && (allowed[i-1].Compare(p) >= 0 || allowed[i-1].Overlaps(p)) {
					t.Fatalf("seed %d: %s to %s: %v is not sorted and apart", seed, protocol, to, allowed)
				}
			}
			v := table.Resolve(d.Protocol, client, to)
			if got := v.Action.String(); got != want.Verdict {
				t.Fatalf("seed %d: %s from %s to %s is %s, not %s", seed, protocol, client, to, got, want.Verdict)
			}
			steering := table.Steering(d)
			if v.Action != steering && steering != policy.Accept {
				t.Fatalf("seed %d: %s from %s to %s is %s, but steering says %s", seed, protocol, client, to, v.Action, steering)
			}
			if steering == policy.Accept {
				switch {
				case !limited:
					limitedBy["nothing"]++
				case want.Policy == "Local" && want.Address == "LoadBalancer" && want.Verdict == "drop" && want.Rule == "A3.10":
					limitedBy["ranges"]++
				case want.Rule == "A3.5":
					limitedBy["policy"]++
				}
			}
		}
	}
	for _, by := range strings.Fields("nothing ranges policy") {
		if limitedBy[by] == 0 {
			t.Errorf("no case was limited by %s", by)
		}
	}
}

// TestDestinations: Destinations yields exactly the destinations that Resolve
// assigns to a service port (A3.1, A4.4, A4.5).
func TestDestinations(t *testing.T) {
	kinds := map[service.AddressKind]int{}
	for seed := range *worlds {
		r := rand.New(rand.NewPCG(8, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		of := map[service.Destination]*service.Port{}
		for _, p := range table.Snapshot().Ports {
			if p == nil {
				continue
			}
			for d, kind := range table.Destinations(p) {
				kinds[kind]++
				v := table.Resolve(d.Protocol, d.Addr, netip.AddrPortFrom(d.Addr, d.Port))
				if v.Port != p || v.Kind != kind {
					t.Fatalf("seed %d: %v is given as %s of %s, but Resolve says %s of %v", seed, d, kind, p.Name, v.Kind, v.Port)
				}
				if of[d] != nil {
					t.Fatalf("seed %d: %v is given to %s and to %s", seed, d, of[d].Name, p.Name)
				}
				of[d] = p
			}
		}
		for range 200 {
			protocol, client, to := c.Question(r)
			d := service.Destination{Addr: to.Addr(), Port: to.Port(), Protocol: protocols[protocol]}
			v := table.Resolve(d.Protocol, client, to)
			oneOfMany := d.Addr.IsLoopback() && d.Addr.String() != "127.0.0.1" && d.Addr.String() != "::1"
			if v.Port != of[d] && !oneOfMany {
				t.Fatalf("seed %d: %v leads to %v, but is given to %v", seed, d, v.Port, of[d])
			}
		}
	}
	for _, k := range []service.AddressKind{service.ClusterIP, service.ExternalIP, service.LoadBalancer, service.NodePort} {
		if kinds[k] == 0 {
			t.Errorf("no destination was a %s", k)
		}
	}
}
