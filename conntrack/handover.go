package conntrack

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Moved is what a process says of an open connection that another one takes over. Times are
// in ns; those without another meaning are since the acceptance.
type Moved struct {
	Age    int64 `json:"age"`  // since the acceptance
	Wall   int64 `json:"wall"` // Unix time of the acceptance
	Client netip.AddrPort
	VIP    netip.AddrPort
	Via    netip.AddrPort
	Local  netip.AddrPort // Record.SourceAddr
	Port   service.PortName

	Endpoint *MovedEndpoint `json:",omitempty"`
	Failed   []MovedAttempt `json:",omitempty"`

	Waited, ConnectTime, FirstByte, Announced int64

	BytesFromClient, BytesFromEndpoint         uint64 // all of them are counted
	DatagramsFromClient, DatagramsFromEndpoint uint64 `json:",omitempty"`

	StreamsFromClient, StreamsToClient uint16 `json:",omitempty"`

	Attempts  uint16
	Protocol  service.Protocol
	Kind      service.AddressKind
	Source    policy.Source
	Affinity  balancer.Affinity
	Connected bool
	Quiet     bool
}

// MovedEndpoint is an endpoint that the other process may not know any more.
type MovedEndpoint struct {
	Addr       netip.AddrPort
	Node, Zone string
	Pod        service.Name
	PodUID     service.UID
}

// MovedAttempt is a failed attempt.
type MovedAttempt struct {
	Endpoint *MovedEndpoint
	Duration int64
	Error    DialError
}

func moveEndpoint(e *service.Endpoint) *MovedEndpoint {
	if e == nil {
		return nil
	}
	return &MovedEndpoint{Addr: e.Addr, Node: e.Node(), Zone: e.Zone(), Pod: e.Pod, PodUID: e.PodUID}
}

// in returns the endpoint in a port's list, or one that only has a name.
func (m *MovedEndpoint) in(port *service.Port) *service.Endpoint {
	if m == nil {
		return nil
	}
	list := port.Families[service.FamilyOf(m.Addr.Addr())].Endpoints
	for i := range list {
		if list[i].Addr == m.Addr && list[i].PodUID == m.PodUID {
			return &list[i]
		}
	}
	return &service.Endpoint{Addr: m.Addr, Place: service.At(m.Node, m.Zone), Pod: m.Pod, PodUID: m.PodUID}
}

// Leave removes an open connection that another process has taken over: it has no end here,
// and no record. Its totals stay.
func (s *Shard) Leave(r *Record) {
	if r.state != recordOpen {
		s.table.misuse.Add(1)
		return
	}
	r.state = recordClosed
	r.Owner = nil
	r.release()
	r.unlink()
	s.count--
	if r.Counters != nil {
		r.countBytes()
		r.Counters.active.Add(-1)
	}
}

// Moved describes an open connection for another process, as of now.
func (r *Record) Moved(now int64) Moved {
	r.refresh()
	m := Moved{
		Age: now - r.Start, Wall: r.Wall, Client: r.Client, VIP: r.VIP, Via: r.Via(), Local: r.SourceAddr, Port: r.Port.Name,
		Endpoint: moveEndpoint(r.Endpoint),
		Waited:   r.WaitTime(), ConnectTime: r.ConnectTime, FirstByte: r.FirstByte, Announced: r.attemptStart - r.Start,
		BytesFromClient: r.BytesFromClient, BytesFromEndpoint: r.BytesFromEndpoint,
		DatagramsFromClient: r.DatagramsFromClient, DatagramsFromEndpoint: r.DatagramsFromEndpoint,
		StreamsFromClient: r.StreamsFromClient, StreamsToClient: r.StreamsToClient,
		Attempts: r.Attempts, Protocol: r.Protocol, Kind: r.Kind, Source: r.Source, Affinity: r.Affinity,
		Connected: r.Connected, Quiet: r.Quiet,
	}
	for _, a := range r.Failed {
		m.Failed = append(m.Failed, MovedAttempt{moveEndpoint(a.Endpoint), a.Duration, a.Error})
	}
	return m
}

// Join adds a connection that Leave removed from another process's table: it has a new
// number, and keeps what its record says. The caller has set Counters and Owner.
func (s *Shard) Join(r *Record, m *Moved, port *service.Port, now int64) {
	counters, owner := r.Counters, r.Owner
	*r = Record{
		ID: s.newID(), Start: now - m.Age, Wall: m.Wall, Client: m.Client, VIP: m.VIP,
		Port: port, Endpoint: m.Endpoint.in(port), SourceAddr: m.Local, Counters: counters, Owner: owner,
		ConnectTime: m.ConnectTime, FirstByte: m.FirstByte,
		BytesFromClient: m.BytesFromClient, BytesFromEndpoint: m.BytesFromEndpoint,
		DatagramsFromClient: m.DatagramsFromClient, DatagramsFromEndpoint: m.DatagramsFromEndpoint,
		StreamsFromClient: m.StreamsFromClient, StreamsToClient: m.StreamsToClient,
		countedFromClient: m.BytesFromClient, countedFromEndpoint: m.BytesFromEndpoint,
		countedDatagrams: [2]uint32{uint32(m.DatagramsFromClient), uint32(m.DatagramsFromEndpoint)},
		Attempts:         m.Attempts, Protocol: m.Protocol, Kind: m.Kind, Source: m.Source, Affinity: m.Affinity,
		Connected: m.Connected, Quiet: m.Quiet, state: recordOpen, shard: s,
	}
	r.attemptStart = r.Start + m.Announced
	for _, a := range m.Failed {
		r.Failed = append(r.Failed, Attempt{a.Endpoint.in(port), a.Duration, a.Error})
	}
	r.self = s.table.selfAt(r.Client.Addr())
	if m.Via.IsValid() {
		r.NamedBy(m.Via, m.Client)
	}
	if m.Waited > 0 {
		r.setWaited(m.Waited)
	}
	r.insertBefore(&s.list)
	s.count++
	if counters != nil {
		counters.active.Add(1)
	}
	if r.Connected || r.Protocol == service.UDP {
		r.Resume()
	}
}
