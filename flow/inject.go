package flow

import (
	"net/netip"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// injectSlots is how many packets one system call puts back.
const injectSlots = 128

// injector puts packets back into the ingress of the interface that they came from, and
// sends resets. It belongs to the worker.
type injector struct {
	magic  uint32
	fd     int
	raw    [2]int // by service.Family
	outbox *sys.PacketOutbox
	flows  []*flow // of the packets in the outbox; nil: for the relay
	arena  []byte  // memory for packets that no flow keeps
	packet []byte  // a reset, or an abort
	lost   atomic.Uint64
}

func newInjector(magic uint32) (*injector, error) {
	i := &injector{magic: magic, fd: -1, raw: [2]int{-1, -1}, outbox: sys.NewPacketOutbox(injectSlots)}
	var err error
	if i.fd, err = sys.PacketSender(); err != nil {
		return nil, err
	}
	for f := range i.raw {
		if i.raw[f], err = sys.RawSender(f == 1); err != nil {
			i.close()
			return nil, err
		}
	}
	return i, nil
}

func (i *injector) close() {
	for _, fd := range append(i.raw[:], i.fd) {
		if fd >= 0 {
			sys.Close(fd)
		}
	}
}

// put queues the packet of a flow. BPF enters the flow's tuples when it sees the packet.
func (i *injector) put(f *flow, ipv6 bool, data []byte) {
	atomic.AddUint32(&f.shared().Inject, 1)
	i.add(f, int(f.shared().Ifindex), ipv6, i.magic|f.index, data)
}

// pass queues a packet for the relay; the map relayed already names its connection.
func (i *injector) pass(ifindex int, ipv6 bool, data []byte) {
	at := len(i.arena)
	i.arena = append(i.arena, data...)
	i.add(nil, ifindex, ipv6, i.magic, i.arena[at:])
}

func (i *injector) add(f *flow, ifindex int, ipv6 bool, mark uint32, data []byte) {
	if i.outbox.Full() {
		i.flush()
	}
	i.outbox.Add(ifindex, ipv6, mark, data)
	i.flows = append(i.flows, f)
}

// busyTries is how often a packet is sent again while the CPU's queue is full.
const busyTries = 3

// flush sends what is queued.
func (i *injector) flush() {
	tries := 0
	for at := 0; at < i.outbox.Len(); {
		f := i.flows[at]
		if f != nil && f.collided() {
			// Another flow's replies have this tuple: f has another port now. The call that
			// sent the packets before this one did not return this one's error.
			tries++
		}
		n, errno := 0, sys.ENOBUFS
		if tries <= portTries {
			n, errno = i.outbox.Send(i.fd, at)
		}
		switch {
		case errno == 0:
			at, tries = at+n, 0
			continue
		case errno == sys.EINTR, errno == sys.ENOBUFS && f != nil && f.seen()&bpf.KernelSeenCOLLIDED != 0:
			continue
		case errno == sys.ENOBUFS:
			if tries++; tries <= busyTries {
				continue
			}
		}
		i.lost.Add(1)
		at, tries = at+1, 0
	}
	i.outbox.Clear()
	clear(i.flows)
	i.flows = i.flows[:0]
	i.arena = i.arena[:0]
}

// reset sends an RST.
func (i *injector) reset(r reset) {
	i.packet = r.append(i.packet[:0])
	i.send(r.to.Addr())
}

// abort sends an ABORT.
func (i *injector) abort(a abort) {
	i.packet = a.append(i.packet[:0])
	i.send(a.to.Addr())
}

// send sends i.packet.
func (i *injector) send(to netip.Addr) {
	if errno := sys.SendRaw(i.raw[service.FamilyOf(to)], to, i.packet); errno != 0 {
		i.lost.Add(1)
	}
}

// putCopy queues another packet of a flow that has no tuples yet.
func (i *injector) putCopy(f *flow, ipv6 bool, data []byte) {
	at := len(i.arena)
	i.arena = append(i.arena, data...)
	i.put(f, ipv6, i.arena[at:])
}

// collided changes the flow's port if BPF found that another flow's replies have its tuple. It
// reports whether to send the packet again.
func (f *flow) collided() bool {
	k := f.shared()
	if f.seen()&bpf.KernelSeenCOLLIDED == 0 {
		return false
	}
	atomic.AndUint32((*uint32)(&k.Seen), ^uint32(bpf.KernelSeenCOLLIDED))
	f.movePorts()
	if f.isUDP() {
		f.clearWay(poll.Nanotime())
	}
	atomic.AddUint32(&k.Inject, 1) // BPF has counted the packet that it dropped
	return true
}
