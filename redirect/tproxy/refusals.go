package tproxy

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// refusals is what was read of the sets in which the rules count.
type refusals struct {
	generation int
	seen       map[string]uint64 // packets, by the key of an element
	totals     [redirect.Reasons]uint64
}

// Refused returns what the rules have refused and dropped; see [redirect.Counter]. The kernel
// counts by client and destination alone: the reason is that of the plan now. What finds no
// room in the sets is not among the totals. Beside a program that finds sockets, which counts
// the rest itself, it is what is sent to addresses that are not ours.
func (r *Redirector) Refused() (redirect.Refused, error) {
	var out redirect.Refused
	err := r.Locked(func() error {
		var err error
		out, err = r.refusals.read(r.filter, &r.Plan)
		return err
	})
	return out, err
}

// read reads the sets, and remembers what it has told.
func (r *refusals) read(f *filter, p *redirect.Plan) (redirect.Refused, error) {
	var out redirect.Refused
	if r.generation != f.generation {
		r.generation, r.seen = f.generation, nil
	}
	now := make(map[string]uint64)
	for v := range versions {
		list, err := f.reader.elements(f.table.Name, setName(counted, v, f.generation))
		if err != nil {
			return out, err
		}
		for _, e := range list {
			d, client := countedBy(e.key, int(families[v].addrLen))
			if f.numbers.lookup && !p.NonLocal.Has(d.Addr) {
				continue
			}
			now[e.key] = e.packets
			before := r.seen[e.key]
			if e.packets < before {
				before = 0 // its time was over, and it has come again
			}
			if e.packets == before {
				continue
			}
			reason := reasonOf(p, d)
			r.totals[reason] += e.packets - before
			out.New = append(out.New, redirect.Refusal{Client: client, Destination: d, Reason: reason, Packets: e.packets - before})
		}
	}
	r.seen = now
	out.Totals = r.totals
	return out, nil
}

// countedBy parses the key of an element; addresses have so many bytes.
func countedBy(key string, size int) (service.Destination, netip.Addr) {
	b := []byte(key)
	client, _ := netip.AddrFromSlice(b[:size])
	to, _ := netip.AddrFromSlice(b[size : 2*size])
	rest := b[2*size:]
	return service.Destination{Addr: to, Port: binary.BigEndian.Uint16(rest[4:]), Protocol: redirect.ProtocolOf(rest[0])}, client
}

// reasonOf returns why a plan does not serve a destination.
func reasonOf(p *redirect.Plan, d service.Destination) redirect.Reason {
	switch {
	case p.Silent.Has(d):
		return redirect.NoLocalEndpoints
	case p.Refuse.Has(d), p.NonLocal.Has(d.Addr):
		return redirect.NoEndpoints
	case p.ClusterIPs.Has(d.Addr):
		return redirect.UnknownPort
	}
	return redirect.UnknownAddress
}
