package bpf

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// TakeOthers offers the connections and sessions that programs of other versions forward, and returns how
// many flows these keep. Their packets pass this version's programs first; those that are taken, whose
// place take returns, are void for the others then. The kernel describes what other versions' maps
// hold; what this one does not understand is left.
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
	words, err := sys.MapArray[uint32](m.FD(), entries*form.size/4)
	if err != nil {
		return 0, err
	}
	defer sys.UnmapArray(words)
	var late []func()
	for i := range entries {
		entry, state := memory[i*form.size:][:form.size], &words[(i*form.size+form.state)/4]
		if KernelState(atomic.LoadUint32(state)) == KernelStateFREE {
			continue
		}
		var was KernelFlow
		form.read(entry, &was)
		isSession := was.Protocol == syscall.IPPROTO_UDP
		if was.Seen&KernelSeenRECORDED != 0 {
			continue // it has ended
		}
		if isSession {
			was.leaveToSession()
		}
		var own *KernelFlow
		if was.isWhole() && (isSession || form.connections) {
			k := was
			own = take(&k)
		}
		if own == nil && !was.isGivenUp() {
			left++
			continue
		}
		entry[form.protocol] = 0 // no tuple finds it any more, and its version uses the index again once that runs
		last := KernelState(atomic.SwapUint32(state, uint32(KernelStateFREE)))
		if own == nil {
			continue
		}
		merge := func() {
			now := was
			if form.read(entry, &now); isSession {
				now.leaveToSession()
			}
			now.State = last
			own.merge(&was, &now)
			was = now
		}
		merge()
		late = append(late, merge)
	}
	for _, merge := range late { // of programs that had found it before
		merge()
	}
	return left, nil
}

// leaveToSession leaves a UDP session the marks that isOfSessions names.
func (k *KernelFlow) leaveToSession() {
	k.Seen, k.FirstEnd = k.Seen&(KernelSeenKNOWN|KernelSeenPASSED|KernelSeenCOLLIDED), 0
}

// merge adds what another version's programs have seen of a flow since it was read. This version's may
// have handled packets of it, too.
func (k *KernelFlow) merge(was, now *KernelFlow) {
	atomic.OrUint32((*uint32)(&k.Seen), uint32(now.Seen&^was.Seen))
	for _, f := range []struct {
		own       *uint64
		was, then uint64
	}{{&k.Answered, was.Answered, now.Answered}, {&k.Data, was.Data, now.Data}, {&k.Closed, was.Closed, now.Closed}} {
		atomic.CompareAndSwapUint64(f.own, f.was, f.then)
	}
	atomic.CompareAndSwapUint32((*uint32)(&k.FirstEnd), uint32(was.FirstEnd), uint32(now.FirstEnd))
	for i := range k.Way {
		own, was, now := &k.Way[i], &was.Way[i], &now.Way[i]
		atomic.AddUint64(&own.Bytes, now.Bytes-was.Bytes)
		atomic.AddUint64(&own.Packets, now.Packets-was.Packets)
		atomic.CompareAndSwapUint64(&own.Last, was.Last, now.Last)
		atomic.CompareAndSwapUint32(&own.End, was.End, now.End)
		atomic.CompareAndSwapUint32(&own.Acked, was.Acked, now.Acked)
	}
	atomic.CompareAndSwapUint64(&k.Confirmed, was.Confirmed, now.Confirmed)
	for i := range k.Fin {
		atomic.AddUint32(&k.Again[i], now.Again[i]-was.Again[i])
		atomic.AddUint32(&k.Missed[i], now.Missed[i]-was.Missed[i])
		atomic.CompareAndSwapUint32(&k.Fin[i], was.Fin[i], now.Fin[i])
		atomic.CompareAndSwapUint32(&k.Ahead[i], was.Ahead[i], now.Ahead[i])
	}
	atomic.CompareAndSwapUint32((*uint32)(&k.State), uint32(was.State), uint32(now.State))
	const acked = KernelSeenCLIENT_FIN_ACKED | KernelSeenENDPOINT_FIN_ACKED
	if k.Seen&acked == acked && atomic.CompareAndSwapUint32((*uint32)(&k.State), uint32(KernelStateOPEN), uint32(KernelStateCLOSED)) {
		atomic.StoreUint64(&k.Closed, k.Last()) // each version has seen one end
	}
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

func (f *form) read(entry []byte, k *KernelFlow) {
	b := make([]byte, binary.Size(k))
	for _, p := range f.parts {
		copy(b[p.to:][:p.size], entry[p.from:])
	}
	_, _ = binary.Decode(b, binary.NativeEndian, k) // it is as long as that
}

// isWhole reports whether another version's flow has an endpoint and all that this version needs, and
// nothing that it does not know.
func (k *KernelFlow) isWhole() bool {
	const known = KernelOptionOPTION_MASQUERADE | KernelOptionOPTION_IPV6 | KernelOptionOPTION_NODE | KernelOptionOPTION_MOVED
	hidden := k.Options&(KernelOptionOPTION_MASQUERADE|KernelOptionOPTION_NODE) != 0
	settled := k.State == KernelStateOPEN || k.State == KernelStateCLOSED || k.State == KernelStateASKING
	return (settled || k.isGivenUp() && k.Protocol == syscall.IPPROTO_TCP) && k.Options&^known == 0 && k.Seen&KernelSeenCOLLIDED == 0 &&
		k.ClientPort != 0 && k.VipPort != 0 && k.EndpointPort != 0 && k.MiddlePort != 0 && (!hidden || k.NodePort != 0)
}

// isGivenUp reports whether no endpoint's answer can open a connection that has begun: the client's next
// packet does.
func (k *KernelFlow) isGivenUp() bool {
	return k.State == KernelStateMOVING && k.Protocol != syscall.IPPROTO_UDP && k.Options&KernelOptionOPTION_DIRECT == 0
}
