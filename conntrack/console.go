package conntrack

import (
	"bytes"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
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
	b = append(b, ' ')
	b = r.Client.AppendTo(b)
	b = append(b, " -> "...)
	b = r.VIP.AppendTo(b)
	if r.Protocol == service.UDP {
		b = append(b, " UDP"...)
	}
	if r.Port != nil {
		b = append(b, ' ')
		c.name = appendPortName(c.name[:0], &r.Port.Name)
		b = printable.AppendName(b, string(c.name))
	}
	if r.Endpoint != nil && (r.Connected || len(r.Failed) < int(r.Attempts)) {
		b = append(b, " -> "...)
		b = r.Endpoint.Addr.AppendTo(b)
		if r.Endpoint.Pod.Name != "" {
			b = append(b, ' ')
			b = printable.AppendName(b, r.Endpoint.Pod.Name)
		}
		if r.Endpoint.Node != "" {
			b = append(b, " on "...)
			b = printable.AppendName(b, r.Endpoint.Node)
		}
		if r.SourceAddr.IsValid() {
			b = append(b, " from "...)
			b = r.SourceAddr.AppendTo(b)
		}
	}
	if len(r.Failed) > 0 {
		b = append(b, " | "...)
		b = strconv.AppendUint(b, uint64(r.Attempts), 10)
		b = append(b, " attempts: "...)
		for i := range r.Failed {
			a := &r.Failed[i]
			if i > 0 {
				b = append(b, ", "...)
			}
			if a.Endpoint != nil {
				b = a.Endpoint.Addr.AppendTo(b)
				b = append(b, ' ')
				if a.Endpoint.Pod.Name != "" {
					b = printable.AppendName(b, a.Endpoint.Pod.Name)
					b = append(b, ' ')
				}
			}
			b = append(b, a.Error.String()...)
			b = append(b, ' ')
			b = appendDuration(b, a.Duration)
		}
	}
	if r.Affinity != balancer.AffinityNone {
		b = append(b, " | affinity "...)
		b = append(b, r.Affinity.String()...)
	}
	b = append(b, " | "...)
	if r.Connected {
		b = append(b, "connect "...)
		b = appendDuration(b, r.ConnectTime)
		b = append(b, ", "...)
	}
	if r.FirstByte > 0 {
		b = append(b, "first byte "...)
		b = appendDuration(b, r.FirstByte)
		b = append(b, ", "...)
	}
	b = append(b, "total "...)
	b = appendDuration(b, r.Duration)
	b = append(b, " | "...)
	b = appendAmount(b, r, r.BytesFromClient, r.DatagramsFromClient)
	b = append(b, " up, "...)
	b = appendAmount(b, r, r.BytesFromEndpoint, r.DatagramsFromEndpoint)
	b = append(b, " down | "...)
	b = append(b, r.End.String()...)
	b = append(b, '\n')
	c.scratch = b
	c.out.Write(b)
}

// appendAmount writes the bytes of one direction, and the datagrams if there are
// any: "78 B", "78 B in 2".
func appendAmount(b []byte, r *Record, bytes, datagrams uint64) []byte {
	b = appendBytes(b, bytes)
	if r.Protocol == service.UDP {
		b = append(b, " in "...)
		b = strconv.AppendUint(b, datagrams, 10)
	}
	return b
}

// appendDuration writes a duration in ns with at most three significant digits:
// 85us, 1.24ms, 310ms, 12.3s, then 4m10s, 3h5m.
func appendDuration(b []byte, ns int64) []byte {
	d := time.Duration(max(ns, 0))
	switch {
	case d < time.Millisecond:
		b = strconv.AppendInt(b, int64(d/time.Microsecond), 10)
		return append(b, "us"...)
	case d < time.Second:
		return append(appendThree(b, int64(d), int64(time.Millisecond)), "ms"...)
	case d < time.Minute:
		return append(appendThree(b, int64(d), int64(time.Second)), 's')
	case d < time.Hour:
		b = strconv.AppendInt(b, int64(d/time.Minute), 10)
		b = append(b, 'm')
		b = strconv.AppendInt(b, int64(d%time.Minute/time.Second), 10)
		return append(b, 's')
	}
	b = strconv.AppendInt(b, int64(d/time.Hour), 10)
	b = append(b, 'h')
	b = strconv.AppendInt(b, int64(d%time.Hour/time.Minute), 10)
	return append(b, 'm')
}

// appendBytes writes a number of bytes: 78 B, 1.25 KiB, 3.1 MiB.
func appendBytes(b []byte, n uint64) []byte {
	if n < 1<<10 {
		b = strconv.AppendUint(b, n, 10)
		return append(b, " B"...)
	}
	units := [...]string{" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"}
	unit, i := uint64(1<<10), 0
	for i < len(units)-1 && n/unit >= 1<<10 {
		unit <<= 10
		i++
	}
	b = appendThree(b, int64(n>>1), int64(unit>>1))
	return append(b, units[i]...)
}

// appendThree writes n/unit, truncated to three digits, without trailing zeros in
// the fraction.
func appendThree(b []byte, n, unit int64) []byte {
	whole := n / unit
	b = strconv.AppendInt(b, whole, 10)
	digits := 2
	if whole >= 100 {
		digits = 0
	} else if whole >= 10 {
		digits = 1
	}
	rest := n % unit
	var fraction [2]byte
	used := 0
	for i := range digits {
		rest *= 10
		fraction[i] = byte('0' + rest/unit)
		rest %= unit
		if fraction[i] != '0' {
			used = i + 1
		}
	}
	if used > 0 {
		b = append(b, '.')
		b = append(b, fraction[:used]...)
	}
	return b
}
