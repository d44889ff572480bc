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

// TakeOthers offers the UDP sessions that programs of other versions forward. Their datagrams pass this
// version's programs first, which would begin another session with each: those that are taken are
// void for the others then. The kernel describes what other versions' maps hold; what this one does not
// understand is left.
func (p *Pins) TakeOthers(take func([]KernelFlow) (taken []bool)) error {
	own := pinPrefix + p.version + "_"
	for _, name := range pinNames(p.dir) {
		version, isFlows := strings.CutSuffix(name, "_"+KernelMapFlows)
		if !isFlows || strings.HasPrefix(name, own) {
			continue
		}
		if err := p.takeFrom(version, take); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// takeFrom is TakeOthers for one version.
func (p *Pins) takeFrom(version string, take func([]KernelFlow) (taken []bool)) error {
	if ours, err := p.ofThisNamespace(version); err != nil || !ours {
		return err
	}
	m, there, err := p.other(version, KernelMapFlows, "flow")
	if err != nil {
		return err
	}
	defer m.Close()
	spec, err := LoadKernel()
	if err != nil {
		return err
	}
	form, err := formOf(spec.Maps[KernelMapFlows].Value, there)
	if err != nil {
		return err
	}
	entries := int(m.MaxEntries())
	form.size = (int(m.ValueSize()) + 7) &^ 7
	memory, err := sys.MapArray[byte](m.FD(), entries*form.size)
	if err != nil {
		return err
	}
	defer sys.UnmapArray(memory)
	var list []KernelFlow
	var at [][]byte
	for i := range entries {
		if entry := memory[i*form.size:][:form.size]; form.isSession(entry) {
			var k KernelFlow
			if form.read(entry, &k); k.isWhole() {
				k.Seen, k.FirstEnd = k.Seen&(KernelSeenKNOWN|KernelSeenPASSED), 0
				list, at = append(list, k), append(at, entry)
			}
		}
	}
	for i, taken := range take(list) {
		if taken {
			form.void(at[i])
		}
	}
	return nil
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
}

// part is a number in another version's flows, and in KernelFlow.
type part struct{ from, to, size int }

// formOf compares what this version's flows are with another one's. Each of the fields that both
// have must be of one kind, with one meaning of its values.
func formOf(own btf.Type, there *btf.Struct) (*form, error) {
	f := &form{protocol: -1, state: -1}
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
		if other, is := there.(*btf.Enum); !is || !agree(own.Values, other.Values) {
			return differs
		}
	}
	if n, err := btf.Sizeof(there); err != nil || n != size {
		return differs
	}
	f.parts = append(f.parts, part{from: from, to: to, size: size})
	return nil
}

// ofSessions names the values on which versions have to agree. Others are of connections.
var ofSessions = []string{"FREE", "ASKING", "OPEN", "COLLIDED", "RECORDED", "KNOWN", "PASSED",
	"OPTION_MASQUERADE", "OPTION_IPV6", "OPTION_DIRECT", "OPTION_NODE", "OPTION_MOVED"}

// agree reports whether none of these values has another name elsewhere, and no name another value.
func agree(own, there []btf.EnumValue) bool {
	for _, x := range own {
		for _, y := range there {
			if slices.Contains(ofSessions, x.Name) && (x.Name == y.Name) != (x.Value == y.Value) {
				return false
			}
		}
	}
	return true
}

// isSession reports whether an entry is a UDP session that has an endpoint.
func (f *form) isSession(entry []byte) bool {
	state := KernelState(binary.NativeEndian.Uint32(entry[f.state:]))
	return entry[f.protocol] == syscall.IPPROTO_UDP && (state == KernelStateASKING || state == KernelStateOPEN)
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

// isWhole reports whether another version's session has all that this version needs, and nothing that
// it does not know.
func (k *KernelFlow) isWhole() bool {
	const known = KernelOptionOPTION_MASQUERADE | KernelOptionOPTION_IPV6 | KernelOptionOPTION_NODE | KernelOptionOPTION_MOVED
	hidden := k.Options&(KernelOptionOPTION_MASQUERADE|KernelOptionOPTION_NODE) != 0
	return k.Options&^known == 0 && k.Seen&(KernelSeenRECORDED|KernelSeenCOLLIDED) == 0 &&
		k.ClientPort != 0 && k.VipPort != 0 && k.EndpointPort != 0 && k.MiddlePort != 0 && (!hidden || k.NodePort != 0)
}
