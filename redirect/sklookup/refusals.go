package sklookup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// refusals are the maps in which the program counts what it refuses and drops. All programs
// of a Redirector, one after another, count in the same ones.
type refusals struct {
	each   *ebpf.Map // client, destination and reason to packets
	totals *ebpf.Map // reason to packets, for each CPU

	mu     sync.Mutex // guards what follows, and that the maps are open
	read   [redirect.Reasons]uint64
	closed bool
}

func newRefusals() (*refusals, error) {
	r := new(refusals)
	each := ebpf.MapSpec{Name: "sluice_refusals", Type: ebpf.LRUHash, KeySize: uint32(len(refusalKey{})), ValueSize: 8, MaxEntries: redirect.MaxRefusals}
	if err := newMap(&r.each, each); err != nil {
		return nil, err
	}
	totals := ebpf.MapSpec{Name: "sluice_refused", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: redirect.Reasons}
	if err := newMap(&r.totals, totals); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *refusals) close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	_ = r.each.Close()
	_ = r.totals.Close()
}

// take reads the counts, and empties the map of those by client. That costs one system call
// for each reason if nothing came.
func (r *refusals) take() (redirect.Refused, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out redirect.Refused
	if r.closed {
		return out, nil
	}
	for reason := range out.Totals {
		var cpus []uint64
		if err := r.totals.Lookup(uint32(reason), &cpus); err != nil {
			return out, fmt.Errorf("read the BPF map %s: %w", r.totals, err)
		}
		for _, n := range cpus {
			out.Totals[reason] += n
		}
	}
	if out.Totals == r.read {
		return out, nil
	}
	r.read = out.Totals
	var cursor ebpf.MapBatchCursor
	keys, packets := make([]refusalKey, redirect.MaxRefusals), make([]uint64, redirect.MaxRefusals)
	for {
		n, err := r.each.BatchLookupAndDelete(&cursor, keys, packets, nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return out, fmt.Errorf("read the BPF map %s: %w", r.each, err)
		}
		for i := range n {
			out.New = append(out.New, keys[i].refusal(packets[i]))
		}
		if end {
			return out, nil
		}
	}
}

// refusalKey is the program's struct refusal.
type refusalKey [36]byte

func (k *refusalKey) refusal(packets uint64) redirect.Refusal {
	return redirect.Refusal{
		Client: netip.AddrFrom16([16]byte(k[:16])).Unmap(),
		Destination: service.Destination{
			Addr: netip.AddrFrom16([16]byte(k[16:32])).Unmap(), Port: binary.NativeEndian.Uint16(k[32:]), Protocol: redirect.ProtocolOf(k[34]),
		},
		Reason: redirect.Reason(k[35]), Packets: packets,
	}
}
