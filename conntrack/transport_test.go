package conntrack

import (
	"context"
	"testing"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// counting is a connection whose transport says each time more, until its sockets are closed.
type counting struct {
	said   uint32
	closed bool
}

func (c *counting) Inspect(t *Transport) {
	c.said++
	if !c.closed {
		t.Client = Side{Known: BySocket, Retransmits: c.said}
	}
}

// Records of TCP connections say what the transport said at that moment, if the table is to do so.
func TestRecordsHaveTransports(t *testing.T) {
	for _, tcp := range []bool{false, true} {
		var sink collector
		table := NewTable(Options{Sink: &sink, Opens: true, TCP: tcp})
		s := table.Shard(0)
		for i := range 3 * transportChunk {
			owner := new(counting)
			r := &Record{Start: poll.Nanotime(), Protocol: service.TCP, Port: portHTTP, Endpoint: endpoint, Owner: owner}
			if i%4 == 3 {
				r.Protocol = service.UDP
			}
			s.Open(r)
			if i%4 == 0 {
				r.Announce(r.Start)
			}
			if i%2 == 0 {
				s.Note(r)
				owner.closed = true
			}
			s.Close(r)
			if r.Owner != nil || owner.said > 0 != (tcp && r.Protocol == service.TCP) {
				t.Fatalf("the transport of connection %d was asked %d times", i, owner.said)
			}
		}
		s.Flush()
		closeTable(t, table)
		for _, r := range sink.records {
			i := int(r.ID - 1)
			want := uint32(1)
			if i%4 == 0 && r.Event == Ended {
				want = 2
			}
			switch said := r.Transport(); {
			case !tcp || r.Protocol != service.TCP:
				if said != nil {
					t.Errorf("record %d has %+v", i, said)
				}
			case said == nil || said.Client.Retransmits != want:
				t.Errorf("%s: record %d has %+v, want %d", r.Event, i, said, want)
			}
		}
	}
}

// What transports say costs connections no allocation of their own.
func TestTransportsOfRecordsAllocateInChunks(t *testing.T) {
	table := NewTable(Options{TCP: true})
	past := NewPast(table, LeastPast)
	defer past.Close()
	s, owner := table.Shard(0), new(counting)
	r := new(Record)
	if got := testing.AllocsPerRun(20*transportChunk, func() {
		*r = Record{Protocol: service.TCP, Owner: owner}
		s.Open(r)
		s.Close(r)
	}); got != 0 || owner.said == 0 {
		t.Errorf("%v allocations for each connection, asked %d times", got, owner.said)
	}
	closeTable(t, table)
}

// resent is a connection that sent so many segments again.
type resent struct {
	endable
	segments uint32
}

func (c *resent) Inspect(t *Transport) {
	t.Client = Side{Known: BySocket, RTT: int64(c.segments), Unacked: uint64(c.segments)}
	t.Endpoint = Side{Known: ByPackets, Retransmits: c.segments, Lost: 1, RTT: 5, Unacked: 2}
}

// A list and an end can go by what the transports of open connections say.
func TestInspected(t *testing.T) {
	table := NewTable(Options{Shards: 2})
	var all []*resent
	for i := range 3 * inspectStep {
		c := &resent{endable: endable{shard: table.Shard(i % 2)}, segments: uint32(i)}
		c.record.Owner = c
		c.shard.Open(&c.record)
		all = append(all, c)
	}
	seen := 0
	must.OK(t, table.Inspect(context.Background(), here, func(r *Record) error {
		i := int(r.Transport().Client.RTT)
		rtt, known := r.Transport().RTT()
		again, counted := r.Transport().Retransmits()
		unacked, acked := r.Transport().Unacked()
		if !known || !counted || !acked || rtt != int64(max(i, 5)) || again != int64(i+1) || unacked != int64(i+2) {
			t.Errorf("connection %d has the round-trip time %d, %d segments sent again, and %d bytes unacknowledged", i, rtt, again, unacked)
		}
		seen++
		return nil
	}))
	check.Equal(t, seen, len(all))
	if _, known := new(Transport).RTT(); known {
		t.Error("a transport that says nothing has a round-trip time")
	}
	const most = 10
	ended, err := table.EndInspected(context.Background(), here, 1<<30, Admin, func(r *Record) bool { return r.Transport().Client.RTT < most })
	check.OK(t, err)
	check.Equal(t, ended, most)
	for i, c := range all {
		check.Equalf(t, c.asked == Admin, i < most, "connection %d was ended", i)
	}
}
