package conntrack

import "testing"

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
	if got := table.Stats().Dropped; got != 0 {
		t.Errorf("%d records were lost while there was room", got)
	}
	close(b.released)
	if err := table.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if got := NewTable(Options{Shards: 1}).Room(); got < 1<<30 {
		t.Errorf("without a sink there is room for %d records", got)
	}
}
