package conntrack

import (
	"bytes"
	"net/netip"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

// consoleTime has the day and milliseconds, but no year and zone.
const consoleTime = "01-02 15:04:05.000"

// consoleEncoder writes records as human-readable lines. It is not safe for
// concurrent use.
type consoleEncoder struct {
	out     *bytes.Buffer
	zone    *time.Location
	scratch []byte
	name    []byte
}

func newConsoleEncoder(out *bytes.Buffer, zone *time.Location) *consoleEncoder {
	return &consoleEncoder{out: out, zone: zone, scratch: make([]byte, 0, 1024)}
}

// encode writes, for example:
//
//	06-01 12:00:00.250 10.0.0.7:41822 -> 10.96.0.10:80 default/web:http -> 10.1.0.5:8080 web-2 on b from 10.0.0.1:40112 | 2 attempts: 10.1.0.4:8080 web-1 refused 0.2ms | affinity hit | connect 1.1ms, first byte 3.2ms, total 12ms | 78 B up, 1.2 KiB down | endpoint_fin
func (c *consoleEncoder) encode(r *Record) {
	b := time.Unix(0, r.Wall).In(c.zone).AppendFormat(c.scratch[:0], consoleTime)
	text := func(parts ...string) {
		for _, s := range parts {
			b = append(b, s...)
		}
	}
	name := func(before, s string) {
		if s != "" {
			b = printable.AppendName(append(b, before...), s)
		}
	}
	address := func(before string, a netip.AddrPort) {
		if a.IsValid() {
			b = a.AppendTo(append(b, before...))
		}
	}
	duration := func(before string, ns int64) { b = amount.AppendDuration(append(b, before...), ns) }
	bytes := func(before string, bytes, datagrams uint64) {
		b = amount.AppendBytes(append(b, before...), bytes)
		if r.Protocol != service.TCP { // datagrams, or messages of SCTP
			b = strconv.AppendUint(append(b, " in "...), datagrams, 10)
		}
	}
	name(" node ", r.ClientNode())
	if r.Event == Refused { // its packets may have had several ports
		b = r.Client.Addr().AppendTo(append(b, ' '))
	} else {
		address(" ", r.Client)
	}
	address(" via ", r.Via())
	address(" -> ", r.VIP)
	if r.Protocol != service.TCP {
		text(" ", r.Protocol.String())
	}
	if r.Port != nil {
		c.name = appendPortName(c.name[:0], &r.Port.Name)
		name(" ", string(c.name))
	}
	if r.Event == Refused {
		b = strconv.AppendUint(append(b, " | "...), r.DatagramsFromClient, 10)
		if r.DatagramsFromClient == 1 {
			text(" packet")
		} else {
			text(" packets")
		}
		text(" refused | ", r.End.String(), "\n")
		c.scratch = b
		c.out.Write(b)
		return
	}
	if r.Endpoint != nil && (r.Connected || len(r.Failed) < int(r.Attempts)) {
		address(" -> ", r.Endpoint.Addr)
		name(" ", r.Endpoint.Pod.Name)
		name(" on ", r.Endpoint.Node())
		address(" from ", r.SourceAddr)
	}
	for i := range r.Failed {
		a := &r.Failed[i]
		if i == 0 {
			b = strconv.AppendUint(append(b, " | "...), uint64(r.Attempts), 10)
			text(" attempts:")
		} else {
			text(",")
		}
		if a.Endpoint != nil {
			address(" ", a.Endpoint.Addr)
			name(" ", a.Endpoint.Pod.Name)
		}
		text(" ", a.Error.String())
		duration(" ", a.Duration)
	}
	if r.Affinity != balancer.AffinityNone {
		text(" | affinity ", r.Affinity.String())
	}
	text(" | ")
	if waited := r.WaitTime(); waited > 0 {
		duration("waited ", waited)
		text(", ")
	}
	if r.Connected {
		duration("connect ", r.ConnectTime)
		text(", ")
	}
	if r.FirstByte > 0 {
		duration("first byte ", r.FirstByte)
		text(", ")
	}
	duration("total ", r.Duration)
	if t := r.Transport(); t != nil {
		b = t.appendConsole(b)
	}
	bytes(" | ", r.BytesFromClient, r.DatagramsFromClient)
	bytes(" up, ", r.BytesFromEndpoint, r.DatagramsFromEndpoint)
	if r.Event == Ended {
		text(" down | ", r.End.String())
	} else {
		text(" down | ", r.Event.String())
	}
	b = append(b, '\n')
	c.scratch = b
	c.out.Write(b)
}

// appendConsole appends what is known of both sides, the client before the endpoint.
func (t *Transport) appendConsole(b []byte) []byte {
	both := func(name string, one func(s *Side) bool) {
		b = append(b, name...)
		for i, s := range [...]*Side{&t.Client, &t.Endpoint} {
			if i > 0 {
				b = append(b, '/')
			}
			if !one(s) {
				b = append(b, '-')
			}
		}
	}
	count := func(n uint32, known bool) bool {
		if known {
			b = strconv.AppendUint(b, uint64(n), 10)
		}
		return known
	}
	both(" | rtt ", func(s *Side) bool {
		if s.RTT > 0 {
			b = amount.AppendDuration(b, s.RTT)
		}
		return s.RTT > 0
	})
	both(", retransmits ", func(s *Side) bool { return count(s.Retransmits, s.Known != Nothing) })
	both(", lost ", func(s *Side) bool { return count(s.Lost, s.Known == ByPackets) })
	return b
}

// appendPortName appends n.String() without allocation.
func appendPortName(b []byte, n *service.PortName) []byte {
	b = appendName(b, &n.Name)
	if n.Port != "" {
		b = append(b, ':')
		b = append(b, n.Port...)
	}
	return b
}

// appendName appends n.String() without allocation.
func appendName(b []byte, n *service.Name) []byte {
	b = append(b, n.Namespace...)
	b = append(b, '/')
	return append(b, n.Name...)
}
