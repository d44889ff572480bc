package listener

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// TestPlan follows a few Services through the plan: in and out of the service range,
// without endpoints, on external addresses, and gone.
func TestPlan(t *testing.T) {
	p := newPlane(t, func(_ *plane, o *Options) {
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	})
	p.apply(service.Change{})
	p.want("local 10.96.0.0/16")

	p.apply(web("inside", "10.96.0.1", "10.2.1.2"))
	p.apply(web("outside", "10.97.0.1", "10.2.1.2"))
	p.apply(web("six", "fd00:96::1", "fd00:2:1::2"))
	p.apply(web("empty", "10.96.0.2"))
	p.want(
		"local 10.96.0.0/16", "local 10.97.0.1/32", "local fd00:96::1/128",
		"cluster 10.96.0.1", "cluster 10.97.0.1", "cluster fd00:96::1", "cluster 10.96.0.2",
		"steer TCP 10.96.0.1:80 to 1", "steer TCP 10.97.0.1:80 to 2", "steer TCP [fd00:96::1]:80 to 3",
		"refuse TCP 10.96.0.2:80", // A3.4
	)
	p.apply(gone("six"))
	p.apply(gone("outside"))
	p.apply(gone("empty"))
	local := web("inside", "10.96.0.1", "10.2.1.2")
	policy := corev1.ServiceInternalTrafficPolicyLocal
	local.Services[0].Spec.InternalTrafficPolicy = &policy
	local.Services[0].Spec.ExternalIPs = []string{"192.0.2.1"}
	p.apply(local)
	// What is gone lingers until the grace period is over (A8.7).
	p.want(
		"local 10.96.0.0/16", "local 10.97.0.1/32", "local fd00:96::1/128",
		"cluster 10.96.0.1", "drop TCP 10.96.0.1:80", // A3.5
		"foreign 192.0.2.1", "steer TCP 192.0.2.1:80 to 1", // A3.13
	)
	p.pass()
	p.apply(gone("inside"))
	p.want("local 10.96.0.0/16", "foreign 192.0.2.1", "linger TCP 192.0.2.1:80")
	if next := p.manager.NextMaintenance(); next > time.Second {
		t.Errorf("next maintenance in %s, and a destination lingers", next)
	}
	p.pass()
	p.want("local 10.96.0.0/16")
}

// TestPlanOfTheNodesOwnAddresses: an external IP is steered while it is nobody's, and
// has a bound port once the node has it; a cluster IP of the node is not served.
func TestPlanOfTheNodesOwnAddresses(t *testing.T) {
	p := newPlane(t, func(p *plane, o *Options) {
		p.host = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
		o.HostAddresses = func() []netip.Addr { return p.host }
	})
	c := nodePort(web("web", "10.96.0.1", "10.2.1.2"), 30080)
	c.Services[0].Spec.ExternalIPs = []string{"192.0.2.1"}
	p.apply(c)
	p.apply(web("wrong", "10.1.0.1", "10.2.1.2"))
	served := []string{"local 10.96.0.1/32", "cluster 10.96.0.1", "steer TCP 10.96.0.1:80 to 1", "own TCP 10.1.0.1:30080"}
	before := append(slices.Clone(served), "foreign 192.0.2.1", "steer TCP 192.0.2.1:80 to 1")
	p.want(slices.Clone(before)...)
	p.host = append(p.host, netip.MustParseAddr("192.0.2.1"))
	p.policy.NodeAddresses = p.host
	p.apply(service.Change{})
	p.want(append(slices.Clone(served), "own TCP 192.0.2.1:80", "own TCP 192.0.2.1:30080")...)
	p.host = p.host[:1]
	p.policy.NodeAddresses = p.host
	p.apply(service.Change{})
	p.want(slices.Clone(before)...)
}

// TestPlanWhereEachDestinationIsBound: nothing has a listening socket to be steered to.
func TestPlanWhereEachDestinationIsBound(t *testing.T) {
	p := newPlane(t, func(p *plane, _ *Options) { p.steer.traits.BindEach = true })
	p.apply(web("web", "10.96.0.1", "10.2.1.2"))
	p.apply(web("empty", "10.96.0.2"))
	sctp := web("sctp", "10.96.0.3", "10.2.1.2")
	sctp.Services[0].Spec.Ports[0].Protocol = corev1.ProtocolSCTP
	p.apply(sctp)
	p.want(
		"local 10.96.0.1/32", "local 10.96.0.2/32", "local 10.96.0.3/32",
		"cluster 10.96.0.1", "cluster 10.96.0.2", "cluster 10.96.0.3",
		"steer TCP 10.96.0.1:80 to 80", "refuse TCP 10.96.0.2:80",
	)
	wantCalls(t, p.tcp,
		"apply withdrawn=false", "bind TCP 10.96.0.1:80 accept", "prune",
		"apply withdrawn=false", "bind TCP 10.96.0.2:80 refuse", "prune",
		"apply withdrawn=false", "prune")
}

// TestOrderOfAChange: what admits fewer clients comes before the policy is published,
// what admits more after it, and sockets are closed last.
func TestOrderOfAChange(t *testing.T) {
	p := newPlane(t, func(p *plane, o *Options) {
		p.host = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
		o.HostAddresses = func() []netip.Addr { return p.host }
	})
	c := func(endpoints ...string) service.Change {
		return nodePort(balanced(web("web", "10.96.0.1", endpoints...), "192.0.2.1", "10.1.0.0/24"), 30080)
	}
	p.apply(c("10.2.1.2"))
	calls := p.tcp.took()
	listened := calls[:2]
	slices.Sort(listened)
	if want := []string{
		"listen TCP 10.96.0.1:80", "listen TCP 192.0.2.1:80 for [10.1.0.0/24]", "apply withdrawn=false", "bind TCP 10.1.0.1:30080 accept", "prune",
	}; !slices.Equal(calls, want) {
		t.Errorf("calls %q, want %q", calls, want)
	}
	// The last endpoint goes.
	p.apply(c())
	calls = p.tcp.took()
	slices.Sort(calls[:2])
	if want := []string{
		"unlisten TCP 10.96.0.1:80", "unlisten TCP 192.0.2.1:80", "bind TCP 10.1.0.1:30080 refuse", "apply withdrawn=true", "bind TCP 10.1.0.1:30080 refuse", "prune",
	}; !slices.Equal(calls, want) {
		t.Errorf("calls %q, want %q", calls, want)
	}
	p.apply(gone("web"))
	wantCalls(t, p.tcp, "unbind TCP 10.1.0.1:30080", "apply withdrawn=false", "prune")
}

// TestSteeringIsTriedAgain: after an error, the whole plan comes into force by
// Maintain.
func TestSteeringIsTriedAgain(t *testing.T) {
	p := newPlane(t, nil)
	p.apply(service.Change{})
	p.steer.err = errSteering
	if err := p.manager.Apply(policy.Compile(p.manager.table.Load(), p.store.Apply(web("web", "10.96.0.1", "10.2.1.2")), p.policy)); err == nil || p.manager.Complete() {
		t.Fatalf("error %v, complete %t", err, p.manager.Complete())
	}
	p.want()
	if _, err := p.manager.Maintain(); err != nil || !p.manager.Complete() {
		t.Fatalf("error %v, complete %t", err, p.manager.Complete())
	}
	p.want("local 10.96.0.1/32", "cluster 10.96.0.1", "steer TCP 10.96.0.1:80 to 1")
}

// TestTakenPortIsTriedAgain: a port that another program holds is not in the plan
// until it can be bound.
func TestTakenPortIsTriedAgain(t *testing.T) {
	p := newPlane(t, func(p *plane, o *Options) {
		p.host = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
		o.HostAddresses = func() []netip.Addr { return p.host }
	})
	dst := service.Destination{Addr: p.host[0], Port: 30080, Protocol: service.TCP}
	p.tcp.taken[dst] = true
	p.apply(nodePort(web("web", "10.96.0.1", "10.2.1.2"), 30080))
	steered := []string{"local 10.96.0.1/32", "cluster 10.96.0.1", "steer TCP 10.96.0.1:80 to 1"}
	p.want(slices.Clone(steered)...)
	if got := p.manager.Stats(); got.Conflicts != 1 || got.Claims != 0 || p.manager.NextMaintenance() > time.Second {
		t.Errorf("%+v, next maintenance in %s", got, p.manager.NextMaintenance())
	}
	delete(p.tcp.taken, dst)
	p.pass()
	p.want(append(steered, "own TCP 10.1.0.1:30080")...)
	if got := p.manager.Stats(); got.Conflicts != 0 || got.ConflictsTotal != 1 || got.Claims != 1 {
		t.Errorf("%+v", got)
	}
}

// Rule A3.9: once a policy had sockets bound to clients' addresses, answers to
// those come back for as long as the process lives.
func TestA39_AnswersOnceAlways(t *testing.T) {
	store, p := service.NewStore(service.StoreOptions{NodeName: "node"}), newPlanner()
	c := nodePort(web("web", "10.96.0.1", "10.2.1.2"), 30080)
	plan := func(change service.Change) redirect.Plan {
		return p.finish(policy.Compile(nil, store.Apply(change), policy.Config{NodeName: "node", MasqueradeAll: true}), nil, 0)
	}
	if !plan(c).NodeSourceOnly {
		t.Error("answers are brought back, and every endpoint sees the node's address")
	}
	local := c
	local.Services = []*corev1.Service{c.Services[0].DeepCopy()}
	local.Services[0].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	if plan(local).NodeSourceOnly {
		t.Error("policy Local shows endpoints the client's address")
	}
	if plan(c).NodeSourceOnly {
		t.Error("sockets that are bound to clients' addresses get no answers any more")
	}
}
