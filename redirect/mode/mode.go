// Package mode has what all modes of steering share: the lock, the plan in force,
// the routes and their watcher, and the order of opening and closing.
//
//	type Redirector struct {
//		mode.Core
//		…
//	}
//
//	err := r.Open(mode.Steps{Apply: r.apply, …}, routes, watch.Options{})
package mode

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/service"
)

// ErrClosed is the error of using a Redirector after Close.
var ErrClosed = errors.New("steering is closed")

// Steps are what the modes do differently. Core calls them with its lock held.
type Steps struct {
	// Prepare, if not nil, changes a plan before it is compared with the one in
	// force.
	Prepare func(*redirect.Plan)
	// Steers names what hands packets to listeners, where that carries TCP and UDP
	// only.
	Steers string
	// Check, if not nil, gives the error of a mode's own limit.
	Check func(redirect.Steering) error
	// Apply puts a valid plan in force that differs from Core.Plan by the changes,
	// and says so by Core.Set.
	Apply func(redirect.Plan, *redirect.Changes) error
	// Verify checks a plan that is in force, and repairs what is missing.
	Verify func() (repaired bool, err error)
	// Remove, if not nil, takes out of the kernel what Apply put there. The routes
	// are gone already.
	Remove func() error
	// Release, if not nil, gives back what New opened.
	Release func()
}

// Core is a Redirector but for its Steps and Traits. Its methods that a
// [redirect.Redirector] has are safe for concurrent use, the others are for Steps.
// The zero value is closed.
type Core struct {
	mu    sync.Mutex // guards everything below
	steps *Steps     // nil when closed
	// Plan is the plan in force; empty before the first Apply.
	Plan redirect.Plan
	// Router has the routes; nil where another Redirector makes them.
	Router  *route.Router
	watch   *watch.Watcher // nil likewise
	applied bool           // Plan is in force
	// Demand, if not nil, brings replies back only while a socket needs it.
	Demand *Demand
	// Touched is true while there may be something of ours in the kernel.
	Touched bool
}

// Open gets ready. The router is closed with the Core, also if this fails.
func (c *Core) Open(s Steps, r *route.Router, o watch.Options) (err error) {
	c.steps, c.Router = &s, r
	if r == nil {
		return nil
	}
	o.Gone = r.Follow // Verify takes longer
	if c.watch, err = watch.Open(o); err != nil {
		c.release()
	}
	return err
}

// Changed receives when Verify should be called; see [redirect.Redirector].
func (c *Core) Changed() <-chan struct{} { return c.watch.Changed() }

// Apply puts a plan in force; see [redirect.Redirector]. A plan that the mode
// cannot carry, and a range in Plan.Local that takes in an address of this node,
// are errors, and then nothing is changed. A *redirect.ClashError says that
// somebody else has a route or a rule that is in the way; the rest is in force
// then.
func (c *Core) Apply(p redirect.Plan) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.steps == nil {
		return ErrClosed
	}
	if c.steps.Prepare != nil {
		c.steps.Prepare(&p)
	}
	if c.Demand != nil {
		c.Demand.prepare(&p)
	}
	changes := redirect.Diff(&c.Plan, &p)
	if err := c.check(&p, &changes); err != nil {
		return err
	}
	c.Touched = true
	return c.steps.Apply(p, &changes)
}

func (c *Core) check(p *redirect.Plan, changes *redirect.Changes) error {
	if err := changes.Validate(p); err != nil {
		return err
	}
	for _, s := range changes.Steer {
		if c.steps.Steers != "" && s.Destination.Protocol == service.SCTP {
			return fmt.Errorf("steer %s: %s carries TCP and UDP only", s.Destination, c.steps.Steers)
		}
		if c.steps.Check == nil {
			continue
		}
		if err := c.steps.Check(s); err != nil {
			return fmt.Errorf("steer %s: %w", s.Destination, err)
		}
	}
	if c.Router == nil || len(changes.Local.Add) == 0 {
		return nil
	}
	return c.Router.CheckLocal(changes.Local.Add)
}

// Set says which plan is in force.
func (c *Core) Set(p redirect.Plan) { c.Plan, c.applied = p, true }

// Routed returns the ranges that are routed here: those of the plan in force, or
// what a killed process left.
func (c *Core) Routed() (redirect.Set[netip.Prefix], error) {
	if c.applied {
		return c.Plan.Local, nil
	}
	left, err := c.Router.LocalRoutes()
	return redirect.LocalOf(left...), err
}

// Verify checks what was applied and puts back what is missing; established
// connections live through it.
func (c *Core) Verify() (repaired bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.steps == nil {
		return false, ErrClosed
	}
	if !c.applied {
		return false, nil
	}
	var failed error
	if c.Demand != nil {
		failed = c.Demand.follow()
	}
	repaired, err = c.steps.Verify()
	return repaired, cmp.Or(err, failed)
}

// Locked calls f, which may read what the Steps change, unless the Core is closed.
func (c *Core) Locked(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.steps == nil || !c.applied {
		return nil
	}
	return f()
}

// Close takes everything of ours out of the kernel, the routes first, and gives
// the sockets back. Closing twice is the same as once.
func (c *Core) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.steps == nil {
		return nil
	}
	var routes, rest error
	if c.Touched && c.Router != nil {
		_, routes = c.Router.Remove()
	}
	if c.Touched && c.steps.Remove != nil {
		rest = c.steps.Remove()
	}
	c.release()
	return errors.Join(routes, rest)
}

// Leave gives the sockets back, and leaves what is in the kernel to another process.
func (c *Core) Leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.steps != nil {
		c.release()
	}
}

func (c *Core) release() {
	if c.steps.Release != nil {
		c.steps.Release()
	}
	if c.watch != nil {
		c.watch.Close()
	}
	if c.Router != nil {
		c.Router.Close()
	}
	c.steps = nil
}
