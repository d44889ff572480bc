package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/slowpolicy"
)

// TestUniformIsWhatResolveSays: in random clusters, what Uniform says of a destination is
// what each client gets from Resolve: the same candidates (A3.2, A3.6), and whether the endpoint
// sees its address (A3.7 to A3.9). Nothing else is accepted.
func TestUniformIsWhatResolveSays(t *testing.T) {
	const questions = 400
	seen := map[string]int{}
	for seed := range *worlds {
		r := rand.New(rand.NewPCG(11, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		pods := table.Pods()
		for range questions {
			protocol, client, to := c.Question(r)
			at := service.Destination{Addr: to.Addr(), Port: to.Port(), Protocol: protocols[protocol]}
			isPod := slices.ContainsFunc(pods, func(p netip.Prefix) bool { return p.Contains(client) })
			u, ok := table.Uniform(at)
			if own := c.IsLocal(client); own && (!u.OfNode || client.IsLoopback()) {
				continue
			} else if _, limited := table.SourceRanges(at); own && limited {
				continue
			} else if own {
				seen["of the node itself"]++
			}
			v := table.Resolve(at.Protocol, client, to)
			if admitted, limited := table.SourceRanges(at); limited && table.Steering(at) == policy.Accept && client.Is4() == at.Addr.Is4() {
				is := slices.ContainsFunc(admitted, func(p netip.Prefix) bool { return p.Contains(client) })
				seen[fmt.Sprint("A3.10, admitted: ", is)]++
				if is == (v.Rule == policy.RuleSourceRanges) {
					t.Fatalf("seed %d: %s from %s to %s, source ranges admit the client: %v, but Resolve says %+v", seed, protocol, client, to, is, v)
				}
				if !is {
					continue
				}
			} else if v.Rule == policy.RuleSourceRanges && client.Is4() == at.Addr.Is4() {
				t.Fatalf("seed %d: %s from %s to %s, which has no source ranges, %+v", seed, protocol, client, to, v)
			}
			if client == to.Addr() { // the kernel asks about them
				seen["a client with the destination's address"]++
				continue
			}
			if !ok {
				seen["not uniform"]++
				if v.Action == policy.Accept {
					t.Fatalf("seed %d: %s to %s is not uniform, but %s is accepted: %+v", seed, protocol, to, client, v)
				}
				continue
			}
			candidates, hides := u.Candidates, u.HidesOthers
			if isPod {
				candidates, hides = u.ForPods, u.HidesPods
			}
			if len(candidates) == 0 && v.Rule == policy.RuleNoLocalEndpoints {
				seen["no local endpoints"]++
				continue
			}
			if v.Action != policy.Accept || v.Port != u.Port || !reflect.DeepEqual(v.Candidates, candidates) {
				t.Fatalf("seed %d: %s from %s to %s\ngot  %+v\nwant %+v", seed, protocol, client, to, u, v)
			}
			if seen[v.Kind.String()]++; isPod && len(u.Candidates) < len(u.ForPods) {
				seen["a pod reaches more"]++
			}
			for _, e := range candidates {
				want := policy.SourceClient
				if hides || client == e.Addr.Addr() {
					want = policy.SourceNode
				}
				if got := v.SourceFor(client, e.Addr.Addr()); got != want {
					t.Fatalf("seed %d: %s from %s to %s: endpoint %s sees the %s, Uniform says the %s", seed, protocol, client, to, e.Addr, got, want)
				}
				seen["uniform, endpoint sees the "+want.String()]++
			}
		}
	}
	for _, what := range []string{"not uniform", "no local endpoints", "a pod reaches more", "of the node itself", "A3.10, admitted: true", "A3.10, admitted: false", service.NodePort.String(), service.ExternalIP.String(), service.LoadBalancer.String(), "uniform, endpoint sees the client", "uniform, endpoint sees the node"} {
		if seen[what] == 0 {
			t.Errorf("no case is %q", what)
		}
	}
	t.Logf("%v", seen)
}
