package conntrack

import (
	"io"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

// jsonTime is RFC 3339 with microseconds.
const jsonTime = "2006-01-02T15:04:05.000000Z07:00"

// JSONEncoder writes records as JSON objects, one on each line.
// docs/connection-log.md lists the fields in this order. It is not safe for
// concurrent use.
type JSONEncoder struct {
	log     zerolog.Logger
	scratch []byte
}

// NewJSONEncoder returns an encoder that writes each record by one Write.
func NewJSONEncoder(w io.Writer) *JSONEncoder {
	return &JSONEncoder{log: zerolog.New(printable.JSONWriter{W: w}), scratch: make([]byte, 0, 1024)}
}

// Encode writes one record.
func (j *JSONEncoder) Encode(r *Record) {
	b := j.scratch
	e := j.log.Log()
	b = time.Unix(0, r.Wall).UTC().AppendFormat(b[:0], jsonTime)
	e.Bytes("time", b)
	e.Uint64("id", r.ID)
	switch r.Event {
	case Ended:
	case Listed:
		e.Str("state", r.State().String())
	default:
		e.Str("event", r.Event.String())
	}
	e.Str("protocol", r.Protocol.String())
	e.Str("path", r.Path.String())
	b = r.Client.AppendTo(b[:0])
	e.Bytes("client", b)
	b = r.VIP.AppendTo(b[:0])
	e.Bytes("vip", b)
	e.Str("vip_kind", r.Kind.String())
	if r.Port != nil {
		b = appendPortName(b[:0], &r.Port.Name)
		e.Bytes("service", b)
	}
	if ep := r.Endpoint; ep != nil {
		b = ep.Addr.AppendTo(b[:0])
		e.Bytes("endpoint", b)
		if ep.Pod.Name != "" {
			b = appendName(b[:0], &ep.Pod)
			e.Bytes("pod", b)
		}
		if ep.Node != "" {
			e.Str("node", ep.Node)
		}
		if ep.Zone != "" {
			e.Str("zone", ep.Zone)
		}
		e.Str("source", r.Source.String())
		if r.SourceAddr.IsValid() {
			b = r.SourceAddr.AppendTo(b[:0])
			e.Bytes("source_address", b)
		}
	}
	e.Str("affinity", r.Affinity.String())
	e.Uint16("attempts", r.Attempts)
	if len(r.Failed) > 0 {
		j.scratch = b
		e.Array("failed_attempts", j.failed(r.Failed))
		b = j.scratch
	}
	if r.Connected {
		e.Int64("connect_us", r.ConnectTime/int64(time.Microsecond))
	}
	if r.FirstByte > 0 {
		e.Int64("first_byte_us", r.FirstByte/int64(time.Microsecond))
	}
	e.Int64("duration_us", r.Duration/int64(time.Microsecond))
	e.Uint64("bytes_from_client", r.BytesFromClient)
	e.Uint64("bytes_from_endpoint", r.BytesFromEndpoint)
	if r.Protocol == service.UDP {
		e.Uint64("datagrams_from_client", r.DatagramsFromClient)
		e.Uint64("datagrams_from_endpoint", r.DatagramsFromEndpoint)
	}
	if r.Protocol == service.SCTP {
		e.Uint64("messages_from_client", r.DatagramsFromClient)
		e.Uint64("messages_from_endpoint", r.DatagramsFromEndpoint)
		e.Uint16("streams_from_client", r.StreamsFromClient)
		e.Uint16("streams_to_client", r.StreamsToClient)
	}
	if r.Event == Ended {
		e.Str("end", r.End.String())
	}
	e.Send()
	j.scratch = b
}

// failed returns the failed attempts as an array.
func (j *JSONEncoder) failed(list []Attempt) *zerolog.Array {
	array := zerolog.Arr()
	for i := range list {
		a := &list[i]
		e := zerolog.Dict()
		if a.Endpoint != nil {
			j.scratch = a.Endpoint.Addr.AppendTo(j.scratch[:0])
			e.Bytes("endpoint", j.scratch)
			if a.Endpoint.Pod.Name != "" {
				j.scratch = appendName(j.scratch[:0], &a.Endpoint.Pod)
				e.Bytes("pod", j.scratch)
			}
		}
		e.Str("error", a.Error.String())
		e.Int64("us", a.Duration/int64(time.Microsecond))
		array.Dict(e)
	}
	return array
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
