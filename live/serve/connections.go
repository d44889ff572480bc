package serve

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
)

// page is api.Connections with records that are encoded already.
type page struct {
	Open        int               `json:"open"`
	Matched     int               `json:"matched"`
	Connections []json.RawMessage `json:"connections"`
}

// connections answers with a page of open connections.
func (h *Handler) connections(r *http.Request, q *params) (any, error) {
	f, transport := q.filter(), q.truth("transport")
	order, err := live.ParseOrder(q.Get("sort"))
	if err != nil {
		q.note(wrong("%w", err))
	}
	offset, limit := q.page()
	if q.err != nil {
		return nil, q.err
	}
	found, err := h.options.View.Page(r.Context(), live.Wanted{Filter: f, Order: order, Offset: offset, Limit: limit, Transport: transport})
	if err != nil {
		return nil, err
	}
	answer := &page{Open: found.Open, Matched: found.Matched, Connections: []json.RawMessage{}}
	for i := range found.Records {
		answer.Connections = append(answer.Connections, h.encode(&found.Records[i]))
	}
	return answer, nil
}

// encoder returns an encoder of records, which names clients' pods.
func (h *Handler) encoder(w io.Writer) *conntrack.JSONEncoder {
	h.pods.prepare()
	e := conntrack.NewJSONEncoder(w)
	e.ClientPod = h.pods.At
	return e
}

// encode returns a record as one JSON object.
func (h *Handler) encode(r *conntrack.Record) json.RawMessage {
	var b bytes.Buffer
	h.encoder(&b).Encode(r)
	return bytes.TrimSpace(b.Bytes())
}

// encodeJudged returns a record with the verdict about it.
func (h *Handler) encodeJudged(r *conntrack.Record) json.RawMessage {
	verdict, _ := json.Marshal(live.Judge(r)) // two texts are no error
	line := h.encode(r)
	return append(append(append(line[:len(line)-1:len(line)-1], `,"verdict":`...), verdict...), '}')
}

// connection answers with one connection: one that is open, or whose record is kept.
func (h *Handler) connection(r *http.Request, _ *params) (any, error) {
	id, err := strconv.ParseUint(r.PathValue("id"), 10, 64)
	if err != nil {
		return nil, wrong("%q is not the number of a connection", r.PathValue("id"))
	}
	var answer json.RawMessage
	found, err := h.options.View.Find(r.Context(), id, func(r *conntrack.Record) { answer = h.encodeJudged(r) })
	if err == nil && !found {
		found, err = h.findPast(r.Context(), id, func(r *conntrack.Record) { answer = h.encodeJudged(r) })
	}
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, &requestError{http.StatusNotFound, fmt.Errorf("no open connection has the number %d, and none whose record is kept", id)}
	}
	return answer, nil
}

// allConnections streams the open connections that match, in no certain order.
func (h *Handler) allConnections(s *stream, q *params) error {
	f, transport := q.filter(), q.truth("transport")
	if q.err != nil {
		return q.err
	}
	encoder := h.encoder(s)
	list := h.options.View.List
	if transport || f.NeedsTransport() {
		list = h.options.View.Inspect
	}
	return list(s.context(), func(r *conntrack.Record) error {
		if f.Match(r) {
			encoder.Encode(r)
		}
		return s.err
	})
}

const (
	// tapBatch is how many records a tap takes at once.
	tapBatch = 128
	// maxRate bounds the rate of a tap.
	maxRate = 1_000_000
)

// tap streams the records of connections as they end, or open.
func (h *Handler) tap(s *stream, q *params) error {
	f, opens, rate := h.endedFilter(q), q.truth("opens"), q.number("rate", 0, maxRate)
	if q.err != nil {
		return q.err
	}
	tap, err := h.options.View.Tap(conntrack.TapOptions{Match: f.Match, Opens: opens, Rate: rate})
	if err != nil {
		return err
	}
	defer tap.Close()
	s.begin()
	encoder := h.encoder(s)
	buf := make([]conntrack.Record, tapBatch)
	for {
		n, lost, err := tap.Next(s.context(), buf)
		if err != nil {
			return nil // the client has gone
		}
		for i := range buf[:n] {
			encoder.Encode(&buf[i])
		}
		if lost > 0 {
			s.send(&struct {
				Lost uint64 `json:"lost"`
			}{lost})
		}
		s.flush()
		if s.err != nil {
			return nil
		}
	}
}

// failures answers with the last failed attempts.
func (h *Handler) failures(r *http.Request, q *params) (any, error) {
	limit, wanted, name := q.number("limit", api.DefaultRows, api.MaxRows), q.endpoint(), q.service()
	if q.err != nil {
		return nil, q.err
	}
	all, err := h.options.View.Failures(r.Context())
	if err != nil {
		return nil, err
	}
	answer := &api.Failures{Failures: []api.Failure{}}
	for i := range all {
		if len(answer.Failures) >= limit {
			break
		}
		f := &all[i]
		if wanted.IsValid() && (f.Endpoint == nil || !covers(wanted, f.Endpoint.Addr)) ||
			name != "" && (f.Port == nil || f.Port.Name.String() != name && f.Port.Name.Name.String() != name) {
			continue
		}
		answer.Failures = append(answer.Failures, failureOf(f))
	}
	return answer, nil
}

func failureOf(f *conntrack.Failure) api.Failure {
	out := api.Failure{Time: f.At.UTC(), ID: f.ID, Client: f.Client.String(), Error: f.Reason(), US: f.Duration.Microseconds()}
	if f.Packets > 0 {
		out.Client, out.VIP, out.Packets = f.Client.Addr().String(), f.VIP.String(), f.Packets
	}
	if f.Port != nil {
		out.Service = f.Port.Name.String()
	}
	if ep := f.Endpoint; ep != nil {
		out.Endpoint, out.Pod, out.Node = ep.Addr.String(), ep.PodName(), ep.Node()
	}
	return out
}
