package conntrack

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// blocked is a Sink that takes nothing until it is released.
type blocked struct{ released chan struct{} }

func (b *blocked) Write([]Record) { <-b.released }
func (b *blocked) Flush()         {}

func TestRoom(t *testing.T) {
	b := &blocked{released: make(chan struct{})}
	table := NewTable(Options{Shards: 1, Sink: b, Queue: 3 * batchSize})
	shard := table.Shard(0)
	for table.Room() > 0 {
		r := new(Record)
		shard.Open(r)
		shard.Close(r)
		shard.Flush()
	}
	check.Equalf(t, table.Stats().Dropped, 0, "records were lost while there was room")
	close(b.released)
	check.OK(t, table.Close(t.Context()))
	if got := NewTable(Options{Shards: 1}).Room(); got < 1<<30 {
		t.Errorf("without a sink there is room for %d records", got)
	}
}
