package bpf

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// TakeOthers offers the connections and sessions that programs of other versions forward, and returns how
// many flows these keep. Their packets pass this version's programs first; those that are taken, whose
// place take returns, are void for the others then. The kernel describes what other versions' maps
// hold; what this one does not understand is left, and handshakes under way are.
func (p *Pins) TakeOthers(take func(*KernelFlow) *KernelFlow) (left int, err error) {
	own := pinPrefix + p.version + "_"
	for _, name := range pinNames(p.dir) {
		version, isFlows := strings.CutSuffix(name, "_"+KernelMapFlows)
		if !isFlows || strings.HasPrefix(name, own) {
			continue
		}
		n, err := p.takeFrom(version, take)
		if left += n; err != nil {
			return left, fmt.Errorf("%s: %w", name, err)
		}
	}
	return left, nil
}

// takeFrom is TakeOthers for one version.
func (p *Pins) takeFrom(version string, take func(*KernelFlow) *KernelFlow) (left int, err error) {
	if ours, err := p.ofThisNamespace(version); err != nil || !ours {
		return 0, err
	}
	m, there, err := p.other(version, KernelMapFlows, "flow")
	if err != nil {
		return 0, err
	}
	defer m.Close()
	spec, err := LoadKernel()
	if err != nil {
		return 0, err
	}
	form, err := formOf(spec.Maps[KernelMapFlows].Value, there)
	if err != nil {
		return 0, err
	}
	entries := int(m.MaxEntries())
	form.size = (int(m.ValueSize()) + 7) &^ 7
	memory, err := sys.MapArray[byte](m.FD(), entries*form.size)
	if err != nil {
		return 0, err
	}
	defer sys.UnmapArray(memory)
	for i := range entries {
		entry := memory[i*form.size:][:form.size]
		if form.isFree(entry) {
			continue
		}
		var k, now KernelFlow
		if form.read(entry, &k); k.Seen&KernelSeenRECORDED != 0 {
			continue // it has ended
		}
		isSession := k.Protocol == syscall.IPPROTO_UDP
		if isSession {
			k.Seen, k.FirstEnd = k.Seen&(KernelSeenKNOWN|KernelSeenPASSED|KernelSeenCOLLIDED), 0
		}
		var own *KernelFlow
		ways := k.Way
		if k.isWhole() && (isSession || form.connections) {
			own = take(&k)
		}
		if own == nil {
			left++
			continue
		}
		if form.read(entry, &now); now.Way != ways && own.Way == ways {
			own.Way = now.Way // a packet has passed by the other version's programs meanwhile
		}
		form.void(entry)
	}
	return left, nil
}

// ofThisNamespace is checkNamespace for another version's pins.
func (p *Pins) ofThisNamespace(version string) (bool, error) {
	m, there, err := p.other(version, KernelMapControls, "control")
	if err != nil {
		return false, err
	}
	defer m.Close()
	at := slices.IndexFunc(there.Members, func(m btf.Member) bool { return m.Name == "netns" })
	value, err := m.LookupBytes(uint32(0))
	if err != nil || at < 0 {
		return false, err
	}
	return binary.NativeEndian.Uint64(value[there.Members[at].Offset.Bytes():]) == p.Netns, nil
}

// other opens a map of another version, with what the kernel says about its values.
func (p *Pins) other(version, name, value string) (m *ebpf.Map, there *btf.Struct, err error) {
	if m, err = ebpf.LoadPinnedMap(filepath.Join(string(p.dir), version+"_"+name), nil); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	handle, err := m.Handle()
	if err != nil {
		return nil, nil, err
	}
	defer handle.Close()
	spec, err := handle.Spec(nil)
	if err != nil {
		return nil, nil, err
	}
	return m, there, spec.TypeByName(value, &there)
}

// form is where another version's flows have what a KernelFlow has.
type form struct {
	size            int // of one
	parts           []part
	protocol, state int
	connections     bool // are described alike, too
}

// part is a number in another version's flows, and in KernelFlow.
type part struct{ from, to, size int }

// formOf compares what this version's flows are with another one's. Each of the fields that both
// have must be of one kind, with one meaning of its values.
func formOf(own btf.Type, there *btf.Struct) (*form, error) {
	f := &form{protocol: -1, state: -1, connections: true}
	if err := f.compare("flow", own, there, 0, 0); err != nil {
		return nil, err
	}
	for _, m := range there.Members {
		switch m.Name {
		case "protocol":
			f.protocol = int(m.Offset.Bytes())
		case "state":
			f.state = int(m.Offset.Bytes())
		}
	}
	if f.protocol < 0 || f.state < 0 {
		return nil, fmt.Errorf("%v has no protocol, or no state", there)
	}
	return f, nil
}

func (f *form) compare(name string, own, there btf.Type, to, from int) error {
	own, there = btf.UnderlyingType(own), btf.UnderlyingType(there)
	size, err := btf.Sizeof(own)
	if err != nil {
		return err
	}
	differs := fmt.Errorf("another version has a different %s", name)
	switch own := own.(type) {
	case *btf.Struct:
		other, is := there.(*btf.Struct)
		if !is {
			return differs
		}
		for _, m := range own.Members {
			at := slices.IndexFunc(other.Members, func(o btf.Member) bool { return o.Name == m.Name })
			if at < 0 {
				continue // it stays 0
			}
			o := other.Members[at]
			if err := f.compare(m.Name, m.Type, o.Type, to+int(m.Offset.Bytes()), from+int(o.Offset.Bytes())); err != nil {
				return err
			}
		}
		return nil
	case *btf.Array:
		other, is := there.(*btf.Array)
		if !is || other.Nelems != own.Nelems {
			return differs
		}
		otherSize, err := btf.Sizeof(other.Type)
		if err != nil {
			return err
		}
		each := size / int(own.Nelems)
		for i := range int(own.Nelems) {
			if err := f.compare(name, own.Type, other.Type, to+i*each, from+i*otherSize); err != nil {
				return err
			}
		}
		return nil
	case *btf.Enum:
		other, is := there.(*btf.Enum)
		if !is || !agree(own.Values, other.Values, isOfSessions) {
			return differs
		}
		f.connections = f.connections && agree(own.Values, other.Values, func(string) bool { return true })
	}
	if n, err := btf.Sizeof(there); err != nil || n != size {
		return differs
	}
	f.parts = append(f.parts, part{from: from, to: to, size: size})
	return nil
}

// isOfSessions reports whether a value counts for UDP sessions. Others are of connections alone.
func isOfSessions(name string) bool {
	return slices.Contains([]string{"FREE", "ASKING", "OPEN", "COLLIDED", "RECORDED", "KNOWN", "PASSED"}, name) || strings.HasPrefix(name, "OPTION_")
}

// agree reports whether none of the values that count has another name elsewhere, and no name another value.
func agree(own, there []btf.EnumValue, counts func(name string) bool) bool {
	for _, x := range own {
		for _, y := range there {
			if counts(x.Name) && (x.Name == y.Name) != (x.Value == y.Value) {
				return false
			}
		}
	}
	return true
}

// isFree reports whether an entry is no flow's.
func (f *form) isFree(entry []byte) bool {
	return KernelState(binary.NativeEndian.Uint32(entry[f.state:])) == KernelStateFREE
}

func (f *form) read(entry []byte, k *KernelFlow) {
	b := make([]byte, binary.Size(k))
	for _, p := range f.parts {
		copy(b[p.to:][:p.size], entry[p.from:])
	}
	_, _ = binary.Decode(b, binary.NativeEndian, k) // it is as long as that
}

// void makes an entry that of no flow: no tuple finds it any more, and its version uses the index again
// once that runs.
func (f *form) void(entry []byte) {
	entry[f.protocol] = 0
	clear(entry[f.state:][:4])
}

// isWhole reports whether another version's flow has an endpoint and all that this version needs, and
// nothing that it does not know.
func (k *KernelFlow) isWhole() bool {
	const known = KernelOptionOPTION_MASQUERADE | KernelOptionOPTION_IPV6 | KernelOptionOPTION_NODE | KernelOptionOPTION_MOVED
	hidden := k.Options&(KernelOptionOPTION_MASQUERADE|KernelOptionOPTION_NODE) != 0
	settled := k.State == KernelStateOPEN || k.State == KernelStateCLOSED || k.State == KernelStateASKING && k.Protocol == syscall.IPPROTO_UDP
	return settled && k.Options&^known == 0 && k.Seen&KernelSeenCOLLIDED == 0 &&
		k.ClientPort != 0 && k.VipPort != 0 && k.EndpointPort != 0 && k.MiddlePort != 0 && (!hidden || k.NodePort != 0)
}
