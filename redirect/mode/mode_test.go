package mode

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestSteps: what a Core calls when, without a kernel.
func TestSteps(t *testing.T) {
	var c Core
	var calls []string
	called := func(want ...string) {
		t.Helper()
		check.EqualSlicesf(t, calls, want, "called")
		calls = nil
	}
	call := func(name string) { calls = append(calls, name) }
	check.ErrorIsf(t, c.Apply(redirect.Plan{}), ErrClosed, "the zero value")
	inside := func() error { call("inside"); return ErrClosed }
	check.OKf(t, c.Locked(inside), "the zero value")
	tooHigh := errors.New("port 9000 is too high")
	broken := error(nil)
	must.OK(t, c.Open(Steps{
		Prepare: func(p *redirect.Plan) { call("prepare"); p.NodeSourceOnly = true },
		Steers:  "the test",
		Check: func(s redirect.Steering) error {
			if s.Destination.Port == 9000 {
				return tooHigh
			}
			return nil
		},
		Apply: func(p redirect.Plan, changes *redirect.Changes) error {
			call("apply")
			if !p.NodeSourceOnly || changes.Size() != 1 {
				t.Errorf("apply %+v, %+v", p, changes)
			}
			if broken == nil {
				c.Set(p)
			}
			return broken
		},
		Verify:  func() (bool, error) { call("verify"); return true, nil },
		Remove:  func() error { call("remove"); return broken },
		Release: func() { call("release") },
	}, nil, watch.Options{}))
	plan := func(port uint16, p service.Protocol) redirect.Plan {
		d := service.Destination{Addr: netip.MustParseAddr("10.96.0.1"), Port: port, Protocol: p}
		return redirect.Plan{Steer: redirect.Map[service.Destination, redirect.Target]{}.With(d, redirect.Target{Port: 1})}
	}
	for _, bad := range []struct {
		plan redirect.Plan
		want string
	}{{plan(0, service.TCP), "port 0"}, {plan(80, service.SCTP), "the test carries TCP and UDP only"}, {plan(9000, service.TCP), "too high"}} {
		check.Error(t, c.Apply(bad.plan), bad.want)
		called("prepare")
	}
	broken = errors.New("broken")
	if err := c.Apply(plan(80, service.TCP)); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	called("prepare", "apply")
	if repaired, err := c.Verify(); repaired || err != nil {
		t.Errorf("verify before a plan is in force: %v, %v", repaired, err)
	}
	check.OKf(t, c.Locked(inside), "before a plan is in force")
	called()
	broken = nil
	check.OK(t, c.Apply(plan(80, service.TCP)))
	check.ErrorIsf(t, c.Locked(inside), ErrClosed, "what f returns")
	if repaired, err := c.Verify(); !repaired || err != nil {
		t.Errorf("verify: %v, %v", repaired, err)
	}
	called("prepare", "apply", "inside", "verify")
	broken = errors.New("broken")
	check.ErrorIsf(t, c.Close(), broken, "close")
	called("remove", "release")
	check.OKf(t, c.Close(), "close again")
	check.ErrorIsf(t, must.Err(c.Verify()), ErrClosed, "verify after Close")
	check.OKf(t, c.Locked(inside), "after Close")
	called()
}
