// Package drops knows the endpoints to which rules of this node drop handshakes: netfilter's, of
// nftables and iptables. A rule that drops looks like an endpoint that is silent.
//
// A BPF program sees each packet that a rule drops (Linux 5.17; CAP_BPF, CAP_PERFMON). To load it takes
// reading the types of the whole kernel, so that a Watch does it at its first question.
package drops

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/host/drops/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// Watch notes what the rules of a network namespace drop. Its methods may be called by any
// goroutine. A nil Watch knows nothing.
type Watch struct {
	namespace uint64
	report    func(error)

	begin  sync.Once
	begun  sync.WaitGroup
	noted  atomic.Pointer[ebpf.Map]
	closed func()
}

// New returns a Watch of the namespace of the calling thread. report is called once if it cannot
// know anything.
func New(report func(error)) *Watch {
	w := &Watch{report: report}
	w.namespace, _ = sys.NetNSInode(0) // no namespace has the number 0
	return w
}

// Dropped reports whether a rule has dropped a packet of a handshake with an endpoint since a time
// of [sys.Monotonic]. It does not wait: what was dropped before the first question, or until the
// program runs, is not known.
func (w *Watch) Dropped(endpoint netip.AddrPort, since int64) bool {
	if w == nil {
		return false
	}
	w.begin.Do(func() { w.begun.Go(w.open) })
	m := w.noted.Load()
	if m == nil {
		return false
	}
	var at uint64
	err := m.Lookup(keyOf(endpoint), &at)
	return err == nil && int64(at) >= since
}

// keyOf returns the key of an endpoint in the program's map.
func keyOf(endpoint netip.AddrPort) *bpf.DropsEndpoint {
	var k bpf.DropsEndpoint
	a := endpoint.Addr().As16()
	for i := range k.Address {
		k.Address[i] = binary.NativeEndian.Uint32(a[4*i:])
	}
	k.Port = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, endpoint.Port()))
	return &k
}

func (w *Watch) open() {
	if err := w.load(); err != nil {
		w.report(err)
	}
}

// load has the program run.
func (w *Watch) load() error {
	spec, err := bpf.LoadDrops()
	if err != nil {
		return err
	}
	if err := spec.Variables["namespace_number"].Set(uint32(w.namespace)); err != nil {
		return err
	}
	var o bpf.DropsObjects
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		return err
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: o.NoteDrop, AttachType: ebpf.AttachTraceRawTp})
	if err != nil {
		return errors.Join(err, o.Close())
	}
	w.closed = func() { _ = errors.Join(l.Close(), o.Close()) }
	w.noted.Store(o.Dropped)
	return nil
}

// Close ends the program. Nobody asks afterwards.
func (w *Watch) Close() {
	if w == nil {
		return
	}
	w.begin.Do(func() {}) // it does not begin any more
	w.begun.Wait()
	if w.closed != nil {
		w.closed()
	}
}
