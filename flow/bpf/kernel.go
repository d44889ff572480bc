package bpf

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// FlowBits is how many bits of a mark, and of a reference, are the index of a flow:
	// FLOW_BITS of index.h.
	FlowBits = 20
	// FlowMask covers them.
	FlowMask = 1<<FlowBits - 1
	// MostFlows bounds the flows of a Kernel: index 0 is none.
	MostFlows = FlowMask
	// Services is how many service ports have a load, as maps.h says. 0 is none.
	Services = 1 << 16
	// MostUnanswered is how many datagrams of a session come up before an endpoint has
	// answered: MOST_UNANSWERED.
	MostUnanswered = 8
	// FirstPort is the lowest port that translated packets get. All are below those that sockets
	// of the relay and of the kernel's choice usually have.
	FirstPort = 1024
	// LastPort is the highest one.
	LastPort = 9999
)

// Kernel is what is loaded into the kernel: the maps, in memory where userspace changes
// them at any time, and the programs.
type Kernel struct {
	Maps     KernelMaps
	Flows    []KernelFlow // by their index
	Index    Index
	Loads    []KernelLoad // by service port
	Spares   Spares
	Control  *KernelControl
	controls []KernelControl

	Ethernet KernelPrograms // for interfaces with a link header of Ethernet

	pins    *Pins
	loading sync.Mutex
	bare    KernelPrograms // guarded by loading
}

// Open loads maps for so many flows, and the programs. Maps that are pinned are
// used again, and programs of the same build.
func Open(flows int, p *Pins) (k *Kernel, err error) {
	if flows < 1 || flows > MostFlows {
		return nil, fmt.Errorf("%d flows: not between 1 and %d", flows, MostFlows)
	}
	spec, err := specFor(flows)
	if err != nil {
		return nil, err
	}
	k = &Kernel{pins: p}
	defer func() {
		if err != nil {
			k.Close()
			k = nil
		}
	}()
	if err = k.openMaps(spec); err != nil {
		return k, fmt.Errorf("BPF maps: %w", err)
	}
	if k.Flows, err = sys.MapArray[KernelFlow](k.Maps.Flows.FD(), flows+1); err != nil {
		return k, err
	}
	if k.Index.Buckets, err = sys.MapArray[KernelBucket](k.Maps.Buckets.FD(), ringFor(flows)); err != nil {
		return k, err
	}
	if k.Loads, err = sys.MapArray[KernelLoad](k.Maps.Loads.FD(), Services); err != nil {
		return k, err
	}
	if k.Spares.ring, err = sys.MapArray[KernelSpare](k.Maps.Spares.FD(), ringFor(flows)); err != nil {
		return k, err
	}
	if k.controls, err = sys.MapArray[KernelControl](k.Maps.Controls.FD(), 1); err != nil {
		return k, err
	}
	k.Control = &k.controls[0]
	for k.Control.Seed == 0 {
		k.Control.Seed = rand.Uint64()
	}
	k.Index.flows, k.Index.seed, k.Spares.control = k.Flows, k.Control.Seed, k.Control
	if err = k.openPrograms(spec, ethernetHeader, &k.Ethernet); err != nil {
		return k, err
	}
	if p != nil {
		_ = p.removeOtherBuilds() // what stays does no harm
	}
	return k, nil
}

// specFor returns the maps for so many flows, and the programs.
func specFor(flows int) (*ebpf.CollectionSpec, error) {
	spec, err := LoadKernel()
	if err != nil {
		return nil, err
	}
	spec.Maps[KernelMapFlows].MaxEntries = uint32(flows + 1)
	spec.Maps[KernelMapBuckets].MaxEntries = uint32(ringFor(flows)) // a flow has four tuples at most
	spec.Maps[KernelMapPowers].Contents = powers()
	spec.Maps[KernelMapSpares].MaxEntries = uint32(ringFor(flows))
	if _, err := os.Stat(kernelBTF); err != nil {
		makeStatic(spec)
	}
	return spec, nil
}

// Bare returns the programs for interfaces without a link header, such as tunnels. The first call
// loads them, which takes some 0.2 s of a CPU, most of it for the kernel's verification: many nodes
// have no such interface. It is safe for concurrent use, until Close.
func (k *Kernel) Bare() (KernelPrograms, error) {
	k.loading.Lock()
	defer k.loading.Unlock()
	if k.bare.Ingress != nil {
		return k.bare, nil
	}
	spec, err := specFor(len(k.Flows) - 1)
	if err != nil {
		return KernelPrograms{}, err
	}
	if err := k.openPrograms(spec, 0, &k.bare); err != nil {
		_ = k.bare.Close()
		k.bare = KernelPrograms{}
		return k.bare, err
	}
	return k.bare, nil
}

// openMaps makes the maps, or takes those that are pinned.
func (k *Kernel) openMaps(spec *ebpf.CollectionSpec) error {
	p := k.pins
	if p == nil {
		return spec.LoadAndAssign(&k.Maps, nil)
	}
	pinned := p.maps(spec)
	defer func() {
		for _, m := range pinned {
			_ = m.Close() // the KernelMaps have descriptors of their own
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
	return all.Assign(&k.Maps)
}

// mapsOf is a spec without programs.
func mapsOf(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	c := spec.Copy()
	clear(c.Programs)
	return c
}

// Close unloads everything that is not pinned or attached. The memory of maps must not be used
// any more.
func (k *Kernel) Close() {
	sys.UnmapArray(k.Flows)
	sys.UnmapArray(k.Index.Buckets)
	sys.UnmapArray(k.Loads)
	sys.UnmapArray(k.Spares.ring)
	sys.UnmapArray(k.controls)
	_ = k.Ethernet.Close()
	_ = k.bare.Close()
	_ = k.Maps.Close()
}

// Last is when the last packet came, either way, by the kernel's clock in ns.
func (k *KernelFlow) Last() uint64 {
	return max(atomic.LoadUint64(&k.Way[0].Last), atomic.LoadUint64(&k.Way[1].Last))
}
