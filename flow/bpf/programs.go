package bpf

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	ethernetHeader = 14
	// programPin follows the version in the names of programs' pins.
	programPin = "program_"
)

// openPrograms takes the programs for interfaces with a link header of some length from the
// pins, if the same build has left them, so that the kernel need not verify them again. Otherwise
// it loads and pins them.
func (k *Kernel) openPrograms(spec *ebpf.CollectionSpec, linkHeader uint32, to *KernelPrograms) error {
	p := k.pins
	if p == nil {
		return k.loadPrograms(spec, linkHeader, to)
	}
	ingress, egress := p.programPath(linkHeader, "ingress"), p.programPath(linkHeader, "egress")
	to.Ingress, to.Egress = k.pinnedProgram(ingress), k.pinnedProgram(egress)
	if to.Ingress != nil && to.Egress != nil && !p.HasOthers() { // else these have to be the first ones: an interface takes a program once
		return nil
	}
	_ = to.Close() // it takes programs that are nil
	if err := k.loadPrograms(spec, linkHeader, to); err != nil {
		return err
	}
	for path, program := range map[string]*ebpf.Program{ingress: to.Ingress, egress: to.Egress} {
		_ = os.Remove(path)
		if err := program.Pin(path); err != nil {
			return fmt.Errorf("BPF programs: pin: %w", err)
		}
	}
	return nil
}

// programPath returns the path of a program's pin, which names the build: all that the
// instructions depend on, but for what the pinned maps say.
func (p *Pins) programPath(linkHeader uint32, side string) string {
	return p.path(fmt.Sprintf("%s%s_%d_%s", programPin, build(), linkHeader, side))
}

// build names the programs' instructions.
func build() string {
	h := sha256.New()
	_, _ = h.Write(_KernelBytes)
	_, _ = fmt.Fprint(h, ServesSCTP())
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// pinnedProgram opens a program's pin. It returns nil if there is none, or not of a program that
// uses the maps of this Kernel.
func (k *Kernel) pinnedProgram(path string) *ebpf.Program {
	program, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return nil
	}
	if program.Type() != ebpf.SchedCLS || !k.isUsedBy(program) {
		_ = program.Close()
		return nil
	}
	return program
}

// isUsedBy reports whether a program works with the maps of this Kernel. Their contents decide
// about its constants.
func (k *Kernel) isUsedBy(program *ebpf.Program) bool {
	info, err := program.Info()
	if err != nil {
		return false
	}
	used, _ := info.MapIDs()
	for _, m := range []*ebpf.Map{k.Maps.Flows, k.Maps.Buckets, k.Maps.Controls, k.Maps.Counters, k.Maps.Loads, k.Maps.Upcalls, k.Maps.Notices} {
		own, err := m.Info()
		if err != nil {
			return false
		}
		if id, ok := own.ID(); !ok || !slices.Contains(used, id) {
			return false
		}
	}
	return true
}

// removeOtherBuilds removes the programs that another build has pinned for the same maps.
func (p *Pins) removeOtherBuilds() error {
	all, own := filepath.Base(p.path(programPin)), filepath.Base(p.path(programPin+build()))
	_, err := removePins(p.dir, func(name string) bool {
		return strings.HasPrefix(name, all) && !strings.HasPrefix(name, own)
	})
	return err
}

// kernelBTF is where a kernel describes its types. Without them, it does not know a packet's
// context in the arguments of a global function.
const kernelBTF = "/sys/kernel/btf/vmlinux"

// makeStatic makes the global functions static that take a packet's context: the kernel then
// verifies them again for each call.
func makeStatic(spec *ebpf.CollectionSpec) {
	for _, program := range spec.Programs {
		for i := range program.Instructions {
			if f := btf.FuncMetadata(&program.Instructions[i]); f != nil && f.Linkage == btf.GlobalFunc && takesContext(f) {
				f.Linkage = btf.StaticFunc
			}
		}
	}
}

// takesContext reports whether the first argument of a function is a packet's context.
func takesContext(f *btf.Func) bool {
	proto, ok := f.Type.(*btf.FuncProto)
	if !ok || len(proto.Params) == 0 {
		return false
	}
	pointer, ok := proto.Params[0].Type.(*btf.Pointer)
	if !ok {
		return false
	}
	to, ok := pointer.Target.(*btf.Struct)
	return ok && to.Name == "__sk_buff"
}

// loadPrograms loads the programs of a spec for interfaces with a link header of the given length.
// It changes the spec.
func (k *Kernel) loadPrograms(spec *ebpf.CollectionSpec, linkHeader uint32, to *KernelPrograms) error {
	for name, value := range map[string]any{
		KernelVarLinkHeader: linkHeader, KernelVarSeed: k.Index.seed, KernelVarLastBucket: k.Maps.Buckets.MaxEntries() - 1,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("BPF programs: %w", err)
		}
	}
	if !ServesSCTP() {
		if err := spec.Variables[KernelVarServesSctp].Set(uint32(0)); err != nil {
			return fmt.Errorf("BPF programs: %w", err)
		}
	}
	err := spec.LoadAndAssign(to, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		KernelMapClients:      k.Maps.Clients,
		KernelMapMembers:      k.Maps.Members,
		KernelMapRefused:      k.Maps.Refused,
		KernelMapNotices:      k.Maps.Notices,
		KernelMapOccupied:     k.Maps.Occupied,
		KernelMapBuckets:      k.Maps.Buckets,
		KernelMapControls:     k.Maps.Controls,
		KernelMapCounters:     k.Maps.Counters,
		KernelMapDestinations: k.Maps.Destinations,
		KernelMapFlows:        k.Maps.Flows,
		KernelMapFragments:    k.Maps.Fragments,
		KernelMapHops:         k.Maps.Hops,
		KernelMapLoads:        k.Maps.Loads,
		KernelMapOrigins:      k.Maps.Origins,
		KernelMapPlaces:       k.Maps.Places,
		KernelMapPowers:       k.Maps.Powers,
		KernelMapRanges:       k.Maps.Ranges,
		KernelMapRelayed:      k.Maps.Relayed,
		KernelMapSessions:     k.Maps.Sessions,
		KernelMapSpares:       k.Maps.Spares,
		KernelMapUpcalls:      k.Maps.Upcalls,
		KernelMapWays:         k.Maps.Ways,
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

// ServesSCTP reports whether kernel flows serve SCTP here: the verifier of older kernels
// follows too many paths through SCTP's functions.
func ServesSCTP() bool { return sys.KernelAtLeast(6, 4) }
