package serve

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
)

var errNoPast = &requestError{http.StatusNotFound, errors.New("the proxy keeps no records of connections that ended: it runs with --past=0")}

// maxPastReaders bounds the memory that readers of the past hold: this many times --past.
const maxPastReaders = 4

var errPastReaders = &requestError{http.StatusServiceUnavailable, fmt.Errorf("%d others read the past: try again", maxPastReaders)}

// past streams the records of connections that ended, the oldest first.
func (h *Handler) past(s *stream, q *params) error {
	f, since, limit := h.endedFilter(q), q.since(), q.number("limit", 0, math.MaxInt32)
	switch {
	case q.err != nil:
		return q.err
	case h.options.Past == nil:
		return errNoPast
	}
	// Each reader keeps the blocks that it reads, however slow it is.
	select {
	case h.pastReaders <- struct{}{}:
		defer func() { <-h.pastReaders }()
	default:
		return errPastReaders
	}
	view := h.options.Past.View()
	s.send(&struct {
		Past api.Past `json:"past"`
	}{api.Past{Since: view.Since.UTC(), Kept: view.Kept, Lost: view.Lost}})
	encoder := h.encoder(s)
	return view.Visit(s.context(), since, limit, f.Match, func(r *conntrack.Record) error {
		encoder.Encode(r)
		return s.err
	})
}

// findPast finds one connection whose record is kept.
func (h *Handler) findPast(ctx context.Context, id uint64, visit func(*conntrack.Record)) (bool, error) {
	if h.options.Past == nil {
		return false, nil
	}
	return h.options.Past.View().Find(ctx, id, visit)
}
