package conntrack

import (
	"encoding/json"
	"io"
	"net/netip"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

// JSONEncoder writes records as JSON objects, one on each line.
// docs/connection-log.md lists the fields in this order. It is not safe for
// concurrent use.
type JSONEncoder struct {
	w      io.Writer
	line   []byte
	second int64  // since 1970, that date is for
	date   []byte // as in RFC 3339, up to the second
	// ClientPod finds the client's pod; the zero Name is none. It is not asked if it is nil.
	ClientPod func(netip.Addr) service.Name
}

// NewJSONEncoder returns an encoder that writes each record by one Write.
func NewJSONEncoder(w io.Writer) *JSONEncoder {
	return &JSONEncoder{w: w, line: make([]byte, 0, 1024)}
}

// Encode writes one record.
func (j *JSONEncoder) Encode(r *Record) {
	b := append(j.line[:0], `{"time":"`...)
	b = j.appendTime(b, r.Wall)
	b = appendNumber(b, `","id":`, r.ID)
	switch r.Event {
	case Ended:
	case Listed:
		b = appendWord(b, `,"state":`, r.State().String())
	default:
		b = appendWord(b, `,"event":`, r.Event.String())
	}
	b = appendWord(b, `,"protocol":`, r.Protocol.String())
	b = appendWord(b, `,"path":`, r.Path.String())
	b = appendAddress(b, `,"client":`, r.Client)
	if node := r.ClientNode(); node != "" {
		b = appendText(b, `,"client_node":`, node)
	} else if j.ClientPod != nil {
		if pod := j.ClientPod(r.Client.Addr()); pod.Name != "" {
			b = appendStrings(append(b, `,"client_pod":`...), pod.Namespace, "/", pod.Name)
		}
	}
	if via := r.Via(); via.IsValid() {
		b = appendAddress(b, `,"via":`, via)
	}
	b = appendAddress(b, `,"vip":`, r.VIP)
	b = appendWord(b, `,"vip_kind":`, r.Kind.String())
	if r.Port != nil {
		n := &r.Port.Name
		b = append(b, `,"service":`...)
		if n.Port == "" {
			b = appendStrings(b, n.Namespace, "/", n.Name.Name)
		} else {
			b = appendStrings(b, n.Namespace, "/", n.Name.Name, ":", n.Port)
		}
	}
	if ep := r.Endpoint; ep != nil {
		b = appendEndpoint(b, ep)
		if ep.Node() != "" {
			b = appendText(b, `,"node":`, ep.Node())
		}
		if ep.Zone() != "" {
			b = appendText(b, `,"zone":`, ep.Zone())
		}
		b = appendWord(b, `,"source":`, r.Source.String())
		if r.SourceAddr.IsValid() {
			b = appendAddress(b, `,"source_address":`, r.SourceAddr)
		}
	}
	b = appendWord(b, `,"affinity":`, r.Affinity.String())
	b = appendNumber(b, `,"attempts":`, uint64(r.Attempts))
	if len(r.Failed) > 0 {
		b = appendFailed(b, r.Failed)
	}
	if waited := r.WaitTime(); waited > 0 {
		b = appendMicroseconds(b, `,"waited_us":`, waited)
	}
	if r.Connected {
		b = appendMicroseconds(b, `,"connect_us":`, r.ConnectTime)
	}
	if r.FirstByte > 0 {
		b = appendMicroseconds(b, `,"first_byte_us":`, r.FirstByte)
	}
	b = appendMicroseconds(b, `,"duration_us":`, r.Duration)
	b = appendNumber(b, `,"bytes_from_client":`, r.BytesFromClient)
	b = appendNumber(b, `,"bytes_from_endpoint":`, r.BytesFromEndpoint)
	datagrams := r.DatagramsFromClient
	if r.Event == Refused {
		datagrams = 0
	}
	if r.Protocol == service.UDP {
		b = appendNumber(b, `,"datagrams_from_client":`, datagrams)
		b = appendNumber(b, `,"datagrams_from_endpoint":`, r.DatagramsFromEndpoint)
	}
	if r.Protocol == service.SCTP {
		b = appendNumber(b, `,"messages_from_client":`, datagrams)
		b = appendNumber(b, `,"messages_from_endpoint":`, r.DatagramsFromEndpoint)
		b = appendNumber(b, `,"streams_from_client":`, uint64(r.StreamsFromClient))
		b = appendNumber(b, `,"streams_to_client":`, uint64(r.StreamsToClient))
	}
	if t := r.Transport(); t != nil {
		b = t.append(b)
	}
	if r.Event == Refused {
		b = appendNumber(b, `,"packets":`, r.DatagramsFromClient)
	}
	if r.Event == Ended || r.Event == Refused {
		b = appendWord(b, `,"end":`, r.End.String())
	}
	j.line = append(b, '}', '\n')
	_, _ = j.w.Write(j.line) // the writer notes its errors
}

// appendTime appends a time in RFC 3339 with microseconds. Most records are of one second.
func (j *JSONEncoder) appendTime(b []byte, wall int64) []byte {
	t := time.Unix(0, wall).UTC()
	if s := t.Unix(); s != j.second || j.date == nil {
		j.second, j.date = s, t.AppendFormat(j.date[:0], "2006-01-02T15:04:05")
	}
	b = append(append(b, j.date...), ".000000Z"...)
	us := t.Nanosecond() / int(time.Microsecond)
	for at := len(b) - 2; us > 0; at-- {
		b[at] = byte('0' + us%10)
		us /= 10
	}
	return b
}

// appendFailed appends the failed attempts as an array.
func appendFailed(b []byte, list []Attempt) []byte {
	b = append(append(b, `,"failed_attempts":`...), '[')
	for i := range list {
		a := &list[i]
		if i > 0 {
			b = append(b, ',')
		}
		start := len(b)
		if a.Endpoint != nil {
			b = appendEndpoint(b, a.Endpoint)
		}
		b = appendWord(b, `,"error":`, a.Error.String())
		b = append(appendMicroseconds(b, `,"us":`, a.Duration), '}')
		b[start] = '{' // in place of the first field's comma
	}
	return append(b, ']')
}

func appendEndpoint(b []byte, ep *service.Endpoint) []byte {
	b = appendAddress(b, `,"endpoint":`, ep.Addr)
	if ep.Pod.Name != "" {
		b = appendStrings(append(b, `,"pod":`...), ep.Pod.Namespace, "/", ep.Pod.Name)
	}
	return b
}

// The functions below append a field. Its key has a comma before it and a colon after it.

func appendText(b []byte, key, value string) []byte {
	return appendStrings(append(b, key...), value)
}

// appendWord is appendText of a word that needs no escapes.
func appendWord(b []byte, key, word string) []byte {
	b = append(append(b, key...), '"')
	return append(append(b, word...), '"')
}

func appendAddress(b []byte, key string, a netip.AddrPort) []byte {
	b = append(b, key...)
	if a.Addr().Zone() != "" { // an interface's name may have any character
		return appendStrings(b, a.String())
	}
	return append(a.AppendTo(append(b, '"')), '"')
}

func appendNumber(b []byte, key string, n uint64) []byte {
	return strconv.AppendUint(append(b, key...), n, 10)
}

func appendMicroseconds(b []byte, key string, ns int64) []byte {
	return strconv.AppendInt(append(b, key...), ns/int64(time.Microsecond), 10)
}

// appendStrings appends texts as one string of JSON.
func appendStrings(b []byte, texts ...string) []byte {
	start := len(b)
	b = append(b, '"')
	for _, s := range texts {
		b = append(b, s...)
	}
	for _, c := range b[start+1:] {
		if escaped[c] {
			quoted, _ := json.Marshal(string(b[start+1:])) // a string is no error
			return append(b[:start], printable.JSON(quoted)...)
		}
	}
	return append(b, '"')
}

// escaped are the bytes that appendStrings leaves to another encoder.
var escaped = func() (is [256]bool) {
	for c := range is {
		is[c] = c < ' ' || c > '~' || c == '"' || c == '\\'
	}
	return is
}()
