package policy_test

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/slowpolicy"
)

// TestCompileInSteps lets a cluster turn into others piece by piece, so that
// addresses and node ports come, go and pass from one service to another. A
// Table that was compiled step by step must decide as one that is compiled of
// the last Snapshot alone, and an earlier one must not change.
func TestCompileInSteps(t *testing.T) {
	const steps, questions = 12, 60
	type question struct {
		protocol service.Protocol
		client   netip.Addr
		to       netip.AddrPort
	}
	outcomes := map[string]int{}
	for seed := range *worlds / 2 {
		r := rand.New(rand.NewPCG(9, seed))
		node := slowpolicy.Random(r)
		store := service.NewStore(service.StoreOptions{NodeName: node.NodeName, ServiceProxyName: node.ProxyName})
		table := policy.Compile(nil, store.Snapshot(), node.Config())
		services, slices := map[service.Name]bool{}, map[service.Name]bool{}
		for step := range steps {
			var c service.Change
			for name := range services {
				if r.IntN(4) == 0 {
					c.Deleted = append(c.Deleted, service.ObjectKey{Kind: service.KindService, Name: name})
					delete(services, name)
				}
			}
			for name := range slices {
				if r.IntN(4) == 0 {
					c.Deleted = append(c.Deleted, service.ObjectKey{Kind: service.KindEndpointSlice, Name: name})
					delete(slices, name)
				}
			}
			next := slowpolicy.Random(r)
			if r.IntN(3) == 0 {
				c.Nodes = next.Nodes
			}
			for _, s := range next.Services {
				if r.IntN(2) == 0 {
					c.Services = append(c.Services, s)
					services[service.Name{Namespace: s.Namespace, Name: s.Name}] = true
				}
			}
			for _, s := range next.Slices {
				if r.IntN(2) == 0 {
					c.EndpointSlices = append(c.EndpointSlices, s)
					slices[service.Name{Namespace: s.Namespace, Name: s.Name}] = true
				}
			}
			cfg := node.Config()
			if r.IntN(4) == 0 { // the node's own name stays
				cfg = next.Config()
				cfg.NodeName = node.NodeName
			}
			var asked []question
			var said []policy.Verdict
			for range questions {
				protocol, client, to := next.Question(r)
				asked = append(asked, question{protocols[protocol], client, to})
				said = append(said, table.Resolve(protocols[protocol], client, to))
			}
			snap := store.Apply(c)
			last := table
			table = policy.Compile(last, snap, cfg)
			alone := policy.Compile(nil, snap, cfg)
			for i, q := range asked {
				got, want := table.Resolve(q.protocol, q.client, q.to), alone.Resolve(q.protocol, q.client, q.to)
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d, step %d: %v\ngot  %+v\nwant %+v", seed, step, q, got, want)
				}
				if again := last.Resolve(q.protocol, q.client, q.to); !reflect.DeepEqual(again, said[i]) {
					t.Fatalf("seed %d, step %d: %v: the last Table said %+v and then %+v", seed, step, q, said[i], again)
				}
				outcomes[got.Action.String()+" "+got.Kind.String()]++
			}
		}
	}
	for _, outcome := range []string{"accept ClusterIP", "accept NodePort", "accept ExternalIP", "accept LoadBalancer", "drop LoadBalancer", "refuse ClusterIP"} {
		if outcomes[outcome] == 0 {
			t.Errorf("no question was answered with %q", outcome)
		}
	}
	t.Logf("%v", outcomes)
}
