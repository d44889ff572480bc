package serve

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
)

// maxAction bounds the body of an action.
const maxAction = 4 << 10

// act serves an action, for clients that may act. Its body is JSON, and says so: a
// page of another site cannot send that.
func act[T any](h *Handler, path string, f func(*http.Request, *T) (any, error)) {
	h.mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
		if !h.mayAct(r) {
			fail(w, &requestError{http.StatusForbidden, errors.New("actions are for the user that sluice runs as, and for root, through the admin socket")})
			return
		}
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			fail(w, &requestError{http.StatusUnsupportedMediaType, errors.New("the Content-Type of an action is application/json")})
			return
		}
		asked := new(T)
		if err := decode(http.MaxBytesReader(w, r.Body, maxAction), asked); err != nil {
			fail(w, err)
			return
		}
		answer, err := f(r, asked)
		reply(w, answer, err)
	})
}

// decode reads the body of an action strictly: a misspelled field must not change
// what the action does.
func decode(body io.Reader, into any) error {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return wrong("the body of the request: %w", err)
	}
	if d.More() {
		return wrong("the body of the request has more than one object")
	}
	return nil
}

// end ends connections.
func (h *Handler) end(r *http.Request, asked *api.Close) (any, error) {
	f, err := filter.Parse(asked.Filter)
	switch {
	case err != nil:
		return nil, err
	case f.IsEmpty():
		return nil, wrong("a filter is needed: id>0 selects all connections")
	case asked.Limit < 0:
		return nil, wrong("limit: %d is negative", asked.Limit)
	}
	h.pods.name(f)
	answer := &api.Closed{}
	if asked.DryRun {
		list := h.options.View.List
		if f.NeedsTransport() {
			list = h.options.View.Inspect
		}
		err = list(r.Context(), func(c *conntrack.Record) error {
			if f.Match(c) {
				answer.Matched++
			}
			return nil
		})
		return answer, err
	}
	answer.Ended, err = h.options.View.EndWhere(r.Context(), cmp.Or(asked.Limit, math.MaxInt), f)
	answer.Matched = answer.Ended
	event := h.options.Log.Info()
	if err != nil {
		event = h.options.Log.Warn().Err(err)
	}
	event.Str("filter", f.String()).Int("ended", answer.Ended).Msg("connections were ended through the admin socket")
	return answer, err
}

// Bounds of a time of more verbosity.
const (
	maxVerbosity     = 10
	maxVerbosityTime = 24 * time.Hour
)

// verbosity changes the verbosity of the program's log for a time.
func (h *Handler) verbosity(_ *http.Request, asked *api.Verbosity) (any, error) {
	duration := time.Duration(asked.Seconds) * time.Second
	switch {
	case asked.V < 0 || asked.V > maxVerbosity:
		return nil, wrong("v: %d is not between 0 and %d", asked.V, maxVerbosity)
	case asked.Seconds < 1 || asked.Seconds > int(maxVerbosityTime/time.Second):
		return nil, wrong("seconds: %d is not between 1 and %d", asked.Seconds, int(maxVerbosityTime/time.Second))
	}
	h.options.SetVerbosity(asked.V, duration)
	h.options.Log.Info().Int("v", asked.V).Str("for", fmt.Sprint(duration)).Msg("the verbosity of this log was set through the admin socket")
	until := time.Now().Add(duration).UTC()
	return &api.LogState{V: asked.V, Until: &until}, nil
}
