// Package live answers what happens now: which connections are open, which end, and
// at what rates. It costs nothing while nobody asks.
//
// A [View] walks over the table of the event loops' open connections, which has those of
// all data paths. A walk never stops a loop for long, and keeps only what it returns.
package live

import (
	"context"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/filter"
)

// maxWalks bounds the walks at a time that wait for no client; more wait. Those of
// List wait for their visitors.
const maxWalks = 2

// View shows the connections of all event loops. It is safe for concurrent use.
type View struct {
	table  *conntrack.Table
	post   conntrack.Post
	walks  chan struct{} // a semaphore
	meters meters
}

// New returns a View of a table whose shards belong to the loops of post.
func New(table *conntrack.Table, post conntrack.Post) *View {
	v := &View{table: table, post: post, walks: make(chan struct{}, maxWalks)}
	v.meters.view = v
	return v
}

// begin waits for a turn to walk.
func (v *View) begin(ctx context.Context) error {
	select {
	case v.walks <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (v *View) end() { <-v.walks }

// List visits each open connection. One that opens or ends meanwhile may be visited or
// not. The record is valid only during the call.
func (v *View) List(ctx context.Context, visit func(*conntrack.Record) error) error {
	return v.table.List(ctx, v.post, visit)
}

// Inspect is List with what the transports say ([conntrack.Record.Transport]), which costs system calls.
func (v *View) Inspect(ctx context.Context, visit func(*conntrack.Record) error) error {
	return v.table.Inspect(ctx, v.post, visit)
}

// Find visits one open connection, with what its transport says; false if there is none.
func (v *View) Find(ctx context.Context, id uint64, visit func(*conntrack.Record)) (bool, error) {
	if err := v.begin(ctx); err != nil {
		return false, err
	}
	defer v.end()
	return v.table.Find(ctx, v.post, id, visit)
}

// EndWhere ends the connections that match, as an operator does, at most a number of them, and returns how
// many.
func (v *View) EndWhere(ctx context.Context, most int, f *filter.Filter) (ended int, err error) {
	if err := v.begin(ctx); err != nil {
		return 0, err
	}
	defer v.end()
	if f.NeedsTransport() {
		return v.table.EndInspected(ctx, v.post, most, conntrack.Admin, f.Match)
	}
	return v.table.EndWhere(ctx, v.post, most, conntrack.Admin, f.Match)
}

// Tap begins to receive the records of connections that end, or open.
func (v *View) Tap(o conntrack.TapOptions) (*conntrack.Tap, error) { return v.table.Tap(o) }

// Failures returns the last failed attempts and broken connections, newest first.
func (v *View) Failures(ctx context.Context) ([]conntrack.Failure, error) {
	return v.table.Failures(ctx, v.post)
}

// Totals returns the counters of each service port.
func (v *View) Totals() []conntrack.PortTotals {
	ports, _ := v.table.Totals()
	return ports
}
