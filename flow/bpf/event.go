package bpf

import "encoding/binary"

// EventSize is the length of an event in a ring, without the packet that follows it.
const EventSize = 48

// DecodeEvent decodes an event. It reports false if the event, or its packet, is cut short.
func DecodeEvent(e *KernelEvent, b []byte) (ok bool) {
	if len(b) < EventSize {
		return false
	}
	n := binary.NativeEndian
	*e = KernelEvent{
		Time: n.Uint64(b), Kind: KernelEventKind(n.Uint32(b[8:])), Flow: n.Uint32(b[12:]), Service: n.Uint32(b[16:]),
		Generation: n.Uint32(b[20:]), Ifindex: n.Uint32(b[24:]), Reason: KernelReason(n.Uint32(b[28:])),
		Length: n.Uint32(b[32:]), Header: n.Uint32(b[36:]), Attempt: n.Uint32(b[40:]),
	}
	return int(e.Length) <= len(b)-EventSize
}
