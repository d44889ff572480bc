package sklookup

import (
	"errors"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/redirect/sklookup/bpf"
	"github.com/sluice-proxy/sluice/service"
)

// load loads the program that steers by these maps.
func load(m *maps, r *refusals) (*ebpf.Program, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	program := spec.Programs[bpf.SteerProgSteer]
	program.Name = "sluice"
	for name, to := range map[string]*ebpf.Map{
		bpf.SteerMapDestinations4: m.destinations[service.IPv4], bpf.SteerMapDestinations6: m.destinations[service.IPv6],
		bpf.SteerMapRanges4: m.ranges[service.IPv4], bpf.SteerMapRanges6: m.ranges[service.IPv6],
		bpf.SteerMapSockets: m.sockets, bpf.SteerMapRefusals: r.each, bpf.SteerMapRefused: r.totals,
	} {
		if err := program.Instructions.AssociateMap(name, to); err != nil {
			return nil, err
		}
	}
	return ebpf.NewProgram(program)
}

// loadIngress loads the program that marks answers to ports of a range.
func loadIngress(mark uint32, ports [2]uint16) (*ebpf.Program, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(
		spec.Variables[bpf.SteerVarReplyMark].Set(mark),
		spec.Variables[bpf.SteerVarFirstPort].Set(ports[0]),
		spec.Variables[bpf.SteerVarLastPort].Set(ports[1]),
	); err != nil {
		return nil, err
	}
	spec.Programs[bpf.SteerProgMarkAnswers].Name = "sluice_ingress"
	var loaded struct {
		Program *ebpf.Program `ebpf:"mark_answers"`
	}
	err = spec.LoadAndAssign(&loaded, nil)
	return loaded.Program, err
}
