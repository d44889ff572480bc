package flow

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// flowBits is how many bits of a mark, and of a reference, are the index of a flow:
	// FLOW_BITS of bpf/index.h.
	flowBits = 20
	flowMask = 1<<flowBits - 1
	// MostFlows bounds Options.MaxFlows: index 0 is none.
	MostFlows = flowMask
	// services is how many service ports have a load, as maps.h says. 0 is none.
	services = 1 << 16
)

// bpf is what is loaded into the kernel: the maps, in memory where userspace changes
// them at any time, and the programs, once for interfaces with a link header of Ethernet
// and once for those without any.
type bpf struct {
	kernelMaps
	flows    []kernelFlow
	index    index
	loads    []kernelLoad
	spares   []kernelSpare
	control  *kernelControl
	controls []kernelControl

	ethernet, bare kernelPrograms
}

// openKernel loads maps for so many flows, and the programs. Maps that are pinned are
// used again.
func openKernel(flows int, p *pins) (k *bpf, err error) {
	if flows < 1 || flows > MostFlows {
		return nil, fmt.Errorf("%d flows: not between 1 and %d", flows, MostFlows)
	}
	spec, err := loadKernel()
	if err != nil {
		return nil, err
	}
	spec.Maps[kernelMapFlows].MaxEntries = uint32(flows + 1)
	spec.Maps[kernelMapBuckets].MaxEntries = uint32(ringFor(flows)) // a flow has four tuples at most
	spec.Maps[kernelMapPowers].Contents = powers()
	spec.Maps[kernelMapSpares].MaxEntries = uint32(ringFor(flows))
	k = &bpf{}
	defer func() {
		if err != nil {
			k.close()
			k = nil
		}
	}()
	if err = k.openMaps(spec, p); err != nil {
		return k, fmt.Errorf("BPF maps: %w", err)
	}
	if k.flows, err = sys.MapArray[kernelFlow](k.Flows.FD(), flows+1); err != nil {
		return k, err
	}
	if k.index.buckets, err = sys.MapArray[kernelBucket](k.Buckets.FD(), ringFor(flows)); err != nil {
		return k, err
	}
	if k.loads, err = sys.MapArray[kernelLoad](k.Loads.FD(), services); err != nil {
		return k, err
	}
	if k.spares, err = sys.MapArray[kernelSpare](k.Spares.FD(), ringFor(flows)); err != nil {
		return k, err
	}
	if k.controls, err = sys.MapArray[kernelControl](k.Controls.FD(), 1); err != nil {
		return k, err
	}
	k.control = &k.controls[0]
	for k.control.Seed == 0 {
		k.control.Seed = rand.Uint64()
	}
	k.index.flows, k.index.seed = k.flows, k.control.Seed
	// Verification takes most of a start. The kernel does it on several CPUs at once.
	var bare error
	var loading sync.WaitGroup
	loading.Go(func() { bare = k.loadPrograms(0, &k.bare) })
	err = k.loadPrograms(ethernetHeader, &k.ethernet)
	loading.Wait()
	if err = cmp.Or(err, bare); err != nil {
		return k, err
	}
	return k, nil
}

// openMaps makes the maps, or takes those that are pinned.
func (k *bpf) openMaps(spec *ebpf.CollectionSpec, p *pins) error {
	if p == nil {
		return spec.LoadAndAssign(&k.kernelMaps, nil)
	}
	pinned := p.maps(spec)
	defer func() {
		for _, m := range pinned {
			_ = m.Close() // the kernelMaps have descriptors of their own
		}
	}()
	all, err := ebpf.NewCollectionWithOptions(mapsOf(spec), ebpf.CollectionOptions{MapReplacements: pinned})
	if err != nil {
		return err
	}
	if pinned == nil {
		for name, m := range all.Maps {
			if !isOwnMap(name) {
				continue
			}
			if err := m.Pin(p.path(name)); err != nil {
				all.Close()
				return fmt.Errorf("pin: %w", err)
			}
		}
	}
	defer all.Close()
	return all.Assign(&k.kernelMaps)
}

// mapsOf is a spec without programs.
func mapsOf(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	c := spec.Copy()
	clear(c.Programs)
	return c
}

const ethernetHeader = 14

// loadPrograms loads the programs for interfaces with a link header of some length.
func (k *bpf) loadPrograms(linkHeader uint32, to *kernelPrograms) error {
	spec, err := loadKernel()
	if err != nil {
		return err
	}
	spec.Maps[kernelMapFlows].MaxEntries = k.Flows.MaxEntries()
	spec.Maps[kernelMapBuckets].MaxEntries = k.Buckets.MaxEntries()
	spec.Maps[kernelMapSpares].MaxEntries = k.Spares.MaxEntries()
	for name, value := range map[string]any{
		kernelVarLinkHeader: linkHeader, kernelVarSeed: k.index.seed, kernelVarLastBucket: k.Buckets.MaxEntries() - 1,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("BPF programs: %w", err)
		}
	}
	if !ServesSCTP() {
		if err := spec.Variables[kernelVarServesSctp].Set(uint32(0)); err != nil {
			return fmt.Errorf("BPF programs: %w", err)
		}
	}
	err = spec.LoadAndAssign(to, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		kernelMapNotices:      k.Notices,
		kernelMapBuckets:      k.Buckets,
		kernelMapControls:     k.Controls,
		kernelMapCounters:     k.Counters,
		kernelMapDestinations: k.Destinations,
		kernelMapFlows:        k.Flows,
		kernelMapFragments:    k.Fragments,
		kernelMapLoads:        k.Loads,
		kernelMapOrigins:      k.Origins,
		kernelMapPlaces:       k.Places,
		kernelMapPowers:       k.Powers,
		kernelMapRelayed:      k.Relayed,
		kernelMapSpares:       k.Spares,
		kernelMapUpcalls:      k.Upcalls,
		kernelMapWays:         k.Ways,
	}})
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) && len(verifier.Log) > 1 {
		// The last line counts instructions.
		err = fmt.Errorf("%w (%s)", verifier.Cause, verifier.Log[len(verifier.Log)-2])
	}
	if err != nil {
		return fmt.Errorf("BPF programs: %w", err)
	}
	return nil
}

func (k *bpf) close() {
	sys.UnmapArray(k.flows)
	sys.UnmapArray(k.index.buckets)
	sys.UnmapArray(k.loads)
	sys.UnmapArray(k.spares)
	sys.UnmapArray(k.controls)
	_ = k.ethernet.Close()
	_ = k.bare.Close()
	_ = k.kernelMaps.Close()
}

// ServesSCTP reports whether kernel flows serve SCTP here: the verifier of older kernels
// follows too many paths through SCTP's functions.
func ServesSCTP() bool { return sys.KernelAtLeast(6, 4) }
