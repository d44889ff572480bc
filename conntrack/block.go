package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// blockRoom is the size of a block's encoded records.
	blockRoom = 64 << 10
	// blockNames bounds the size of the names in a block, but for those of the last record.
	blockNames = 64 << 10
	// mostEncoded bounds an encoded record: 16 failed attempts, and addresses with zones.
	mostEncoded = 2 << 10
	// mostBlock bounds the size of a block.
	// While it is written, the lists of its names may be twice as long as they need.
	mostBlock = blockRoom + 2*blockNames + 32<<10
)

// block holds encoded records, and the names that they refer to by number. What it points
// to is its own, so that records keep no configuration of the past alive.
type block struct {
	data      []byte
	ports     []service.PortName
	endpoints []named
	node      string // that is the client of some of these records, or ""
	count     int
	names     int    // size of what ports and endpoints hold
	newest    int64  // Unix ns: no record ended later
	lost      uint64 // records that are missing
	moved     bool   // Past.Move has given it; its lock guards this

	// Of the writer: the numbers of ports and endpoints, from 1.
	portNumbers     map[service.PortName]uint64
	endpointNumbers map[named]uint64
	// The port and the endpoint of the record before, which often come again.
	port          *service.Port
	endpoint      *service.Endpoint
	portNo, endNo uint64
}

// named is what a record tells of an endpoint.
type named struct {
	addr       netip.AddrPort
	pod        service.Name
	node, zone string
}

// Sizes in memory, without what strings and slices point to.
var (
	blockSize = int(reflect.TypeFor[block]().Size())
	portSize  = int(reflect.TypeFor[service.PortName]().Size())
	namedSize = int(reflect.TypeFor[named]().Size())
)

// portBytes is the memory of a name.
func portBytes(p *service.PortName) int {
	return portSize + len(p.Namespace) + len(p.Name.Name) + len(p.Port)
}

// bytes is its memory.
func (n *named) bytes() int {
	return namedSize + len(n.pod.Namespace) + len(n.pod.Name) + len(n.node) + len(n.zone)
}

func newBlock() *block {
	return &block{
		data: make([]byte, 0, blockRoom), portNumbers: make(map[service.PortName]uint64), endpointNumbers: make(map[named]uint64),
	}
}

// kept returns a copy that takes no records, and shares nothing with b but names.
func (b *block) kept() *block {
	return &block{
		data: slices.Clone(b.data), ports: slices.Clone(b.ports), endpoints: slices.Clone(b.endpoints),
		node: b.node, count: b.count, names: b.names, newest: b.newest, lost: b.lost,
	}
}

// reset empties b, which keeps its memory.
func (b *block) reset() {
	clear(b.ports)
	clear(b.endpoints)
	clear(b.portNumbers)
	clear(b.endpointNumbers)
	*b = block{data: b.data[:0], ports: b.ports[:0], endpoints: b.endpoints[:0], portNumbers: b.portNumbers, endpointNumbers: b.endpointNumbers}
}

// takes reports whether there is room for a record.
func (b *block) takes(r *Record) bool {
	return len(b.data) <= blockRoom-mostEncoded && b.names < blockNames && (b.node == "" || r.ClientNode() == "" || b.node == r.ClientNode())
}

// size is the memory of a kept block, in bytes.
func (b *block) size() int { return blockSize + cap(b.data) + b.names }

// Bits of an encoded record.
const (
	isConnected = 1 << iota
	isKernel
	isNode // the client is
	isRefused
	hasTransport
)

// add adds a record of a connection that has ended.
func (b *block) add(r *Record) {
	var flags byte
	if r.Connected {
		flags |= isConnected
	}
	if r.Path == Kernel {
		flags |= isKernel
	}
	if r.Event == Refused {
		flags |= isRefused
	}
	if node := r.ClientNode(); node != "" {
		flags |= isNode
		b.node = node
	}
	transport := r.Transport()
	if transport != nil {
		flags |= hasTransport
	}
	d := append(b.data, flags, byte(r.Protocol), byte(r.Kind), byte(r.Source), byte(r.Affinity), byte(r.End))
	d = binary.AppendVarint(d, r.Wall)
	for _, a := range [...]netip.AddrPort{r.Client, r.Via(), r.VIP, r.SourceAddr} {
		d = appendAddrPort(d, a)
	}
	for _, n := range [...]uint64{
		r.ID, b.portNumber(r.Port), b.endpointNumber(r.Endpoint), uint64(r.Duration), uint64(r.WaitTime()), uint64(r.ConnectTime), uint64(r.FirstByte),
		r.BytesFromClient, r.BytesFromEndpoint, r.DatagramsFromClient, r.DatagramsFromEndpoint,
		uint64(r.Attempts), uint64(r.StreamsFromClient), uint64(r.StreamsToClient), uint64(len(r.Failed)),
	} {
		d = binary.AppendUvarint(d, n)
	}
	for i := range r.Failed {
		a := &r.Failed[i]
		d = append(d, byte(a.Error))
		d = binary.AppendUvarint(d, b.endpointNumber(a.Endpoint))
		d = binary.AppendUvarint(d, uint64(a.Duration))
	}
	if transport != nil {
		d = transport.encode(d)
	}
	b.data = d
	b.count++
	b.newest = max(b.newest, r.Wall+r.Duration)
}

// appendAddrPort appends the length of an address and port, and its bytes.
func appendAddrPort(d []byte, a netip.AddrPort) []byte {
	at := len(d)
	d, _ = a.AppendBinary(append(d, 0)) // it has no errors
	d[at] = byte(len(d) - at - 1)       // an interface's name, which may be the zone, has at most 15 bytes
	return d
}

// portNumber returns the number of a service port, 0 for none.
func (b *block) portNumber(p *service.Port) uint64 {
	if p == nil {
		return 0
	}
	if p == b.port {
		return b.portNo
	}
	n := b.portNumbers[p.Name]
	if n == 0 {
		b.ports = append(b.ports, p.Name)
		n = uint64(len(b.ports))
		b.portNumbers[p.Name] = n
		b.names += portBytes(&p.Name)
	}
	b.port, b.portNo = p, n
	return n
}

// endpointNumber returns the number of an endpoint, 0 for none.
func (b *block) endpointNumber(e *service.Endpoint) uint64 {
	if e == nil {
		return 0
	}
	if e == b.endpoint {
		return b.endNo
	}
	name := named{e.Addr, e.Pod, e.Node(), e.Zone()}
	n := b.endpointNumbers[name]
	if n == 0 {
		b.endpoints = append(b.endpoints, name)
		n = uint64(len(b.endpoints))
		b.endpointNumbers[name] = n
		b.names += name.bytes()
	}
	b.endpoint, b.endNo = e, n
	return n
}

// each visits all records, unless all ended before a time.
func (b *block) each(ctx context.Context, after int64, visit func(*Record) error) error {
	if b.newest <= after || b.count == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	ports := make([]service.Port, len(b.ports))
	for i := range b.ports {
		ports[i].Name = b.ports[i]
	}
	endpoints := make([]service.Endpoint, len(b.endpoints))
	for i := range b.endpoints {
		n := &b.endpoints[i]
		endpoints[i] = service.Endpoint{Addr: n.addr, Pod: n.pod, Place: service.At(n.node, n.zone)}
	}
	d := decoder{data: b.data, ports: ports, endpoints: endpoints}
	var r Record
	for len(d.data) > 0 {
		d.record(&r, b.node)
		if d.torn {
			return errors.New("a kept record cannot be read") // not without a bug
		}
		if err := visit(&r); err != nil {
			return err
		}
	}
	return nil
}

// decoder reads encoded records.
type decoder struct {
	data      []byte
	ports     []service.Port
	endpoints []service.Endpoint
	transport Transport // of the record that was read last
	torn      bool
}

// record reads a record.
func (d *decoder) record(r *Record, node string) {
	failed := r.Failed[:0]
	*r = Record{}
	flags := d.byte()
	r.Connected = flags&isConnected != 0
	if flags&isKernel != 0 {
		r.Path = Kernel
	}
	if flags&isRefused != 0 {
		r.Event = Refused
	}
	r.Protocol, r.Kind, r.Source = service.Protocol(d.byte()), service.AddressKind(d.byte()), policy.Source(d.byte())
	r.Affinity, r.End = balancer.Affinity(d.byte()), End(d.byte())
	wall, n := binary.Varint(d.data)
	r.Wall = wall
	d.skip(n)
	if flags&isNode == 0 {
		node = ""
	}
	var via netip.AddrPort
	for _, to := range [...]*netip.AddrPort{&r.Client, &via, &r.VIP, &r.SourceAddr} {
		d.addrPort(to)
	}
	if node != "" || via.IsValid() {
		r.self = &self{name: node, via: via}
	}
	r.ID, r.Port, r.Endpoint = d.number(), d.port(), d.endpoint()
	r.Duration = int64(d.number())
	if waited := int64(d.number()); waited > 0 {
		r.setWaited(waited)
	}
	r.ConnectTime, r.FirstByte = int64(d.number()), int64(d.number())
	r.BytesFromClient, r.BytesFromEndpoint = d.number(), d.number()
	r.DatagramsFromClient, r.DatagramsFromEndpoint = d.number(), d.number()
	r.Attempts, r.StreamsFromClient, r.StreamsToClient = uint16(d.number()), uint16(d.number()), uint16(d.number())
	for n := d.number(); n > 0 && !d.torn; n-- {
		a := Attempt{Error: DialError(d.byte())}
		a.Endpoint, a.Duration = d.endpoint(), int64(d.number())
		failed = append(failed, a)
	}
	r.Failed = failed
	if flags&hasTransport != 0 {
		d.readTransport()
		r.SetTransport(&d.transport)
	}
}

// encode appends what decoder.readTransport reads.
func (t *Transport) encode(d []byte) []byte {
	d = binary.AppendUvarint(d, uint64(t.Idle))
	for _, s := range [...]*Side{&t.Client, &t.Endpoint} {
		d = append(d, byte(s.Known))
		for _, n := range [...]uint64{
			uint64(s.RTT), uint64(s.Idle), s.Unacked, s.Unsent, uint64(s.Window), uint64(s.Retransmits), uint64(s.Unanswered), uint64(s.Lost),
		} {
			d = binary.AppendUvarint(d, n)
		}
	}
	return d
}

func (d *decoder) readTransport() {
	d.transport = Transport{Idle: int64(d.number())}
	for _, s := range [...]*Side{&d.transport.Client, &d.transport.Endpoint} {
		s.Known = Known(d.byte())
		s.RTT, s.Idle, s.Unacked, s.Unsent = int64(d.number()), int64(d.number()), d.number(), d.number()
		s.Window, s.Retransmits, s.Unanswered, s.Lost = uint32(d.number()), uint32(d.number()), uint32(d.number()), uint32(d.number())
	}
}

// skip passes over bytes that were read.
func (d *decoder) skip(n int) {
	if n <= 0 || n > len(d.data) {
		d.torn, d.data = true, nil
		return
	}
	d.data = d.data[n:]
}

func (d *decoder) byte() (b byte) {
	if len(d.data) > 0 {
		b = d.data[0]
	}
	d.skip(1)
	return b
}

func (d *decoder) number() uint64 {
	v, n := binary.Uvarint(d.data)
	d.skip(n)
	return v
}

func (d *decoder) addrPort(to *netip.AddrPort) {
	n := int(d.byte())
	if n > len(d.data) {
		d.torn = true
		return
	}
	if err := to.UnmarshalBinary(d.data[:n]); err != nil {
		d.torn = true
	}
	d.data = d.data[n:]
}

func (d *decoder) port() *service.Port         { return pick(d, d.ports) }
func (d *decoder) endpoint() *service.Endpoint { return pick(d, d.endpoints) }

// pick reads a number, and returns what has it; nil for 0.
func pick[T any](d *decoder, list []T) *T {
	n := d.number()
	switch {
	case n == 0:
		return nil
	case n > uint64(len(list)):
		d.torn = true
		return nil
	}
	return &list[n-1]
}
