package flow

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// manyServices returns one change with so many Services, from a number on. Number i has i%4+1 endpoints,
// and shares its source ranges with those of the same i%5.
func manyServices(from, count int) (all service.Change) {
	for i := from; i < from+count; i++ {
		var endpoints []netip.AddrPort
		for k := range i%4 + 1 {
			endpoints = append(endpoints, at(netip.AddrFrom4([4]byte{10, 200 + byte(k), byte(i >> 8), byte(i)}), 8080))
		}
		ip := balanced(fmt.Sprintf("192.0.%d.%d", 4+i>>8, i&255), fmt.Sprintf("198.51.%d.0/24", i%5))
		c := named(fmt.Sprintf("many-%d", i), onNode("node", svc(fmt.Sprintf("10.97.%d.%d", i>>8, i&255), ip, endpoints...)))
		all.Services, all.EndpointSlices = append(all.Services, c.Services...), append(all.EndpointSlices, c.EndpointSlices...)
	}
	return all
}

// entriesOf reads a map of the kernel.
func entriesOf[K comparable, V any](t *testing.T, m *ebpf.Map) map[K]V {
	t.Helper()
	all := make(map[K]V)
	var k K
	var v V
	each := m.Iterate()
	for each.Next(&k, &v) {
		all[k] = v
	}
	must.OK(t, each.Err())
	return all
}

func (n *node) portServices() (all []*portService) {
	for _, p := range []service.Protocol{service.TCP, service.UDP} {
		all = slices.AppendSeq(all, maps.Values(n.server.paths[p].services))
	}
	return all
}

// TestTableOfManyServices: several goroutines enter the Services of one change. Each list has the endpoints
// of its Service, and all lists go with their Services.
func TestTableOfManyServices(t *testing.T) {
	const count = 400
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(svc(vip4, nil)) // the first one removes what nobody uses
	n.apply(manyServices(0, count))
	destinations := entriesOf[bpf.KernelDestination, bpf.KernelServed](t, n.server.kernel.Maps.Destinations)
	places := entriesOf[bpf.KernelSlot, bpf.KernelPlace](t, n.server.kernel.Maps.Places)
	seen, listed := 0, 0
	lists := make(map[uint32]uint32)
	for _, s := range n.portServices() {
		for _, d := range s.destinations {
			served, is := destinations[d.at]
			if !is || !sameDecision(served, d.served) {
				t.Fatalf("%v: the kernel has %+v, want %+v", d.at, served, d.served)
			}
			seen++
			candidates := make(map[bpf.KernelPlace]bool)
			for _, e := range s.port.Families[service.IPv4].Endpoints {
				candidates[bpf.KernelPlace{Addr: bpf.AddressOf(e.Addr.Addr()), Port: bpf.Wire(e.Addr.Port())}] = true
			}
			for i := range served.Count {
				p := places[bpf.KernelSlot{List: served.List, Number: i}]
				if !candidates[p] {
					t.Fatalf("%s: place %d is %+v, which is no endpoint of it or comes twice", s.name, i, p)
				}
				delete(candidates, p)
			}
			if len(candidates) > 0 {
				t.Fatalf("%s: %d endpoints are missing", s.name, len(candidates))
			}
			if was, again := lists[served.List]; again && was != s.load {
				t.Fatalf("%s: list %d is another service port's, too", s.name, served.List)
			}
			lists[served.List] = s.load
		}
		for _, l := range s.lists {
			listed += int(l.count)
		}
	}
	if seen != 4*count || len(destinations) != seen || len(places) != listed {
		t.Errorf("%d destinations of %d Services, the kernel has %d; %d places, the kernel has %d", seen, count, len(destinations), listed, len(places))
	}
	check.Equalf(t, len(n.server.ranges.sets), 5, "sets of source ranges")
	none := manyServices(0, count)
	none.Services = nil
	for _, s := range none.EndpointSlices {
		s.Endpoints = nil
	}
	n.apply(none)
	if left := entriesOf[bpf.KernelSlot, bpf.KernelPlace](t, n.server.kernel.Maps.Places); len(left) > 0 {
		t.Errorf("%d places are left without endpoints", len(left))
	}
}

// TestManyServicesWithoutRoom: of the destinations of one change, as many as have room are the table's.
func TestManyServicesWithoutRoom(t *testing.T) {
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(svc(vip4, nil))
	const room = 100
	kernelMaps := &n.server.kernel.Maps
	whole := kernelMaps.Destinations
	small, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: whole.KeySize(), ValueSize: whole.ValueSize(), MaxEntries: room})
	must.OK(t, err)
	kernelMaps.Destinations = small
	defer func() {
		kernelMaps.Destinations = whole
		_ = small.Close()
	}()
	n.apply(manyServices(0, 200))
	kernel, known := entriesOf[bpf.KernelDestination, bpf.KernelServed](t, small), 0
	for _, s := range n.portServices() {
		for _, d := range s.destinations {
			if _, is := kernel[d.at]; !is {
				t.Fatalf("%s: %v is not in the kernel", s.name, d.at)
			}
			known++
		}
	}
	if len(kernel) != room || known != room {
		t.Errorf("the kernel has %d destinations, the process knows of %d; want %d", len(kernel), known, room)
	}
}
