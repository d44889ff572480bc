package bpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// TakeOthers offers take each flow of programs of other versions, and returns how many flows these
// programs keep. If take returns a place, the flow moves there and is void for the other programs. This
// version's programs see packets first. BTF describes the layout of other versions' maps; flows with
// unknown fields stay.
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
	known := make([]bool, entries)
	for _, which := range []func(*KernelFlow) bool{(*KernelFlow).IsOver, (*KernelFlow).isOfService, func(*KernelFlow) bool { return true }} {
		left += form.takeAll(memory, words, known, which, take)
	}
	return left, nil
}

// takeAll moves those flows that are not known yet, and returns how many of these stay. Connections that are over
// come first: their clients may use the tuples again for what is relayed now. Direct connections (direct.h)
// come last, with what has begun meanwhile: this version's programs see packets first, and give
// direct ones the tuples of the flows whose ports they have, which nobody may translate then.
func (f *form) takeAll(memory []byte, words []uint32, known []bool, which func(*KernelFlow) bool, take func(*KernelFlow) *KernelFlow) (left int) {
	var leaving []*leavingFlow
	for i := range known {
		l := &leavingFlow{entry: memory[i*f.size:][:f.size], state: &words[(i*f.size+f.state)/4]}
		if known[i] || KernelState(atomic.LoadUint32(l.state)) == KernelStateFREE {
			continue
		}
		l.read = slices.Clone(l.entry)
		f.read(l.read, &l.was)
		if !which(&l.was) {
			continue
		}
		known[i] = true
		ended := l.was.Seen&KernelSeenRECORDED != 0 // it lingers
		if l.was.isSession() {
			l.was.leaveToSession()
		}
		if !ended && l.was.isWhole() && (l.was.isSession() || f.knows(l.read)) {
			k := l.was
			l.own = take(&k)
		}
		if l.own == nil && !ended && !l.was.isGivenUp() {
			left++
			continue
		}
		l.merge(f)
		leaving = append(leaving, l)
	}
	mergeAll := func() { // until programs have ended that had found a flow, or none, before
		for began := time.Now(); len(leaving) > 0 && time.Since(began) < programTime; {
			for _, l := range leaving {
				l.merge(f)
			}
		}
	}
	mergeAll()
	for _, l := range leaving {
		l.void(f)
	}
	mergeAll()
	return left
}

// programTime is longer than a BPF program runs.
const programTime = time.Millisecond

// leavingFlow is a flow of another version, whose programs may still handle a packet of it.
type leavingFlow struct {
	entry  []byte  // in that version's map
	state  *uint32 // the same
	read   []byte  // entry, as was has it
	was    KernelFlow
	voided bool
	own    *KernelFlow // nil: the client's next packet begins another one
}

// void keeps the other version's programs from finding the flow. That version uses the index again once it
// runs.
func (l *leavingFlow) void(f *form) {
	l.merge(f)
	l.entry[f.protocol] = 0
	last := KernelState(atomic.SwapUint32(l.state, uint32(KernelStateFREE)))
	l.voided = true
	if l.own != nil {
		l.own.change(l.was.State, last)
		l.was.State = last
	}
}

// merge adds what the other version's programs have seen since the last time.
func (l *leavingFlow) merge(f *form) {
	if l.own == nil || bytes.Equal(l.read, l.entry) {
		return
	}
	copy(l.read, l.entry)
	now := l.was
	if f.read(l.read, &now); l.was.isSession() {
		now.leaveToSession()
	}
	if l.voided {
		now.Protocol, now.State = l.was.Protocol, l.was.State
	}
	l.own.merge(&l.was, &now)
	l.was = now
}

// leaveToSession leaves a UDP session the marks that isOfSessions names.
func (k *KernelFlow) leaveToSession() {
	k.Seen, k.FirstEnd = k.Seen&(KernelSeenKNOWN|KernelSeenPASSED|KernelSeenCOLLIDED), 0
}

// IsOver reports whether a flow has ended, and perhaps lingers.
func (k *KernelFlow) IsOver() bool {
	return k.State >= KernelStateCLOSED || k.Seen&KernelSeenRECORDED != 0
}

func (k *KernelFlow) isOfService() bool { return k.Options&KernelOptionOPTION_DIRECT == 0 }

func (k *KernelFlow) isSession() bool { return k.Protocol == syscall.IPPROTO_UDP }

func (k *KernelFlow) change(from, to KernelState) {
	atomic.CompareAndSwapUint32((*uint32)(&k.State), uint32(from), uint32(to))
}

// merge adds what another version's programs have seen of a flow since it was read. Their packets came before
// those that this version's programs have handled, which find the flow first.
func (k *KernelFlow) merge(was, now *KernelFlow) {
	atomic.OrUint32((*uint32)(&k.Seen), uint32(now.Seen&^was.Seen))
	if was.FirstEnd == 0 && now.FirstEnd != 0 {
		atomic.StoreUint32((*uint32)(&k.FirstEnd), uint32(now.FirstEnd))
	}
	for _, f := range []struct {
		own       *uint64
		was, then uint64
	}{{&k.Answered, was.Answered, now.Answered}, {&k.Data, was.Data, now.Data}, {&k.Closed, was.Closed, now.Closed}} {
		if f.was == 0 && f.then != 0 {
			atomic.StoreUint64(f.own, f.then)
		}
	}
	for i := range k.Way {
		own, was, now := &k.Way[i], &was.Way[i], &now.Way[i]
		if k.Protocol == syscall.IPPROTO_TCP {
			own.reach(was, now)
		} else {
			atomic.AddUint64(&own.Bytes, now.Bytes-was.Bytes)
			atomic.AddUint64(&own.Packets, now.Packets-was.Packets)
			atomic.CompareAndSwapUint32(&own.End, was.End, now.End)
		}
		atomic.CompareAndSwapUint64(&own.Last, was.Last, now.Last)
		atomic.CompareAndSwapUint32(&own.Acked, was.Acked, now.Acked)
	}
	atomic.CompareAndSwapUint64(&k.Confirmed, was.Confirmed, now.Confirmed)
	for i := range k.Fin {
		atomic.AddUint32(&k.Again[i], now.Again[i]-was.Again[i])
		atomic.AddUint32(&k.Missed[i], now.Missed[i]-was.Missed[i])
		atomic.CompareAndSwapUint32(&k.Fin[i], was.Fin[i], now.Fin[i])
		atomic.CompareAndSwapUint32(&k.Ahead[i], was.Ahead[i], now.Ahead[i])
	}
	k.change(was.State, now.State)
	const acked = KernelSeenCLIENT_FIN_ACKED | KernelSeenENDPOINT_FIN_ACKED
	if k.Seen&acked == acked && atomic.CompareAndSwapUint32((*uint32)(&k.State), uint32(KernelStateOPEN), uint32(KernelStateCLOSED)) {
		atomic.StoreUint64(&k.Closed, k.Last()) // each version has seen one end
	}
}

// reach counts TCP's bytes up to a sequence number that another version's programs have seen since then. This
// version's may have counted them by a later acknowledgement.
func (d *KernelDirection) reach(was, now *KernelDirection) {
	for was.End != now.End {
		old, n := atomic.LoadUint32(&d.End), now.Bytes-was.Bytes
		if old != was.End {
			if int32(now.End-old) <= 0 {
				return
			}
			n = uint64(now.End - old)
		}
		if atomic.CompareAndSwapUint32(&d.End, old, now.End) {
			atomic.AddUint64(&d.Bytes, n)
			return
		}
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
	disputed        []dispute
}

// part is a number in another version's flows, and in KernelFlow.
type part struct{ from, to, size int }

// dispute is a field of connections with marks that another version calls otherwise.
type dispute struct {
	from  int
	marks uint32
}

// knows reports whether this version understands a connection of another one: it has none of the marks whose
// meaning differs. Most are rare, such as that of an RST in doubt.
func (f *form) knows(entry []byte) bool {
	return !slices.ContainsFunc(f.disputed, func(d dispute) bool {
		return binary.NativeEndian.Uint32(entry[d.from:])&d.marks != 0
	})
}

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
		other, is := there.(*btf.Enum)
		if !is || disputed(own.Values, other.Values, isOfSessions) != 0 {
			return differs
		}
		if marks := disputed(own.Values, other.Values, nil); marks != 0 {
			f.disputed = append(f.disputed, dispute{from, marks})
		}
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

// disputed returns the values there that have another name here, or whose name has another value here, of
// those that count; nil: all do.
func disputed(own, there []btf.EnumValue, counts func(name string) bool) (marks uint32) {
	for _, x := range own {
		for _, y := range there {
			if (counts == nil || counts(x.Name)) && (x.Name == y.Name) != (x.Value == y.Value) {
				marks |= uint32(y.Value)
			}
		}
	}
	return marks
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
	const known = KernelOptionOPTION_MASQUERADE | KernelOptionOPTION_IPV6 | KernelOptionOPTION_NODE | KernelOptionOPTION_MOVED | KernelOptionOPTION_DIRECT
	hidden := k.Options&(KernelOptionOPTION_MASQUERADE|KernelOptionOPTION_NODE) != 0
	settled := k.State == KernelStateOPEN || k.State == KernelStateCLOSED || k.State == KernelStateVACATED || k.State == KernelStateASKING
	return (settled || k.isGivenUp() && k.Protocol == syscall.IPPROTO_TCP) && k.Options&^known == 0 && k.Seen&KernelSeenCOLLIDED == 0 &&
		k.ClientPort != 0 && k.VipPort != 0 && k.EndpointPort != 0 && k.MiddlePort != 0 && (!hidden || k.NodePort != 0)
}

// isGivenUp reports whether no endpoint's answer can open a connection that has begun: the client's next
// packet does.
func (k *KernelFlow) isGivenUp() bool {
	return k.State == KernelStateMOVING && k.Protocol != syscall.IPPROTO_UDP && k.Options&KernelOptionOPTION_DIRECT == 0
}
