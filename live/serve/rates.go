package serve

import (
	"cmp"
	"time"

	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
)

// rates streams a frame each interval.
func (h *Handler) rates(s *stream, q *params) (err error) {
	o := live.MeterOptions{Filter: q.recordFilter()}
	if o.By, err = live.ParseDimensions(cmp.Or(q.Get("by"), "service")); err != nil {
		q.note(wrong("%w", err))
	}
	interval := cmp.Or(q.Get("interval"), "1s")
	if o.Interval, err = time.ParseDuration(interval); err != nil || o.Interval < time.Second || o.Interval > time.Hour {
		q.note(wrong("parameter interval: %q is not a duration from 1s to 1h", interval))
	}
	limit, sort := q.number("limit", api.DefaultRows, api.MaxRows), cmp.Or(q.Get("sort"), "opened")
	quiet := q.Get("quiet") == "" || q.truth("quiet")
	if err := new(live.Frame).Sort(sort); err != nil {
		q.note(wrong("%w", err))
	}
	if q.err != nil {
		return q.err
	}
	meter, err := h.options.View.Meter(o)
	if err != nil {
		return err
	}
	defer meter.Close()
	s.begin()
	for {
		frame, err := meter.Next(s.context())
		if err != nil {
			return nil // the client has gone
		}
		if !quiet {
			frame.DropQuiet()
		}
		if err := frame.Sort(sort); err != nil {
			return err
		}
		s.send(frameOf(frame, o.By, limit))
		s.flush()
		if s.err != nil {
			return nil
		}
	}
}

// frameOf returns a frame with its first rows.
func frameOf(f *live.Frame, by live.Dimension, limit int) *api.Frame {
	seconds := f.Length.Seconds()
	out := &api.Frame{
		Time: f.Time.UTC(), Seconds: seconds, By: by.Names(),
		Total: ratesOf(&f.Total, seconds), Rows: make([]api.Rates, 0, min(limit, len(f.Groups))), Groups: len(f.Groups), Lost: f.Lost,
	}
	for _, g := range f.Groups[:min(limit, len(f.Groups))] {
		out.Rows = append(out.Rows, ratesOf(g, seconds))
	}
	return out
}

func ratesOf(g *live.Group, seconds float64) api.Rates {
	per := func(n uint64) float64 { return float64(n) / seconds }
	out := api.Rates{
		Node: g.Key.Node, Open: g.Open, Connecting: g.Connecting,
		Opened: per(g.Opened), Ended: per(g.Ended), Failed: per(g.Failed), Broken: per(g.Broken),
		FailedAttempts: per(g.FailedAttempts), SavedAttempts: per(g.SavedAttempts),
		BytesFromClient: per(g.BytesFromClient), BytesFromEndpoint: per(g.BytesFromEndpoint),
		Answered: per(g.Answered), Unanswered: per(g.Unanswered), Waiting: g.Waiting, UnansweredUS: g.Unserved.Microseconds(),
		ConnectP50US: g.Connect.Quantile(0.5).Microseconds(), ConnectP99US: g.Connect.Quantile(0.99).Microseconds(),
		FirstP50US: g.FirstByte.Quantile(0.5).Microseconds(), FirstP99US: g.FirstByte.Quantile(0.99).Microseconds(),
		DurationP50US: g.Lasted.Quantile(0.5).Microseconds(), DurationP99US: g.Lasted.Quantile(0.99).Microseconds(),
	}
	if g.Key.Service != (service.PortName{}) {
		out.Service, out.Protocol = g.Key.Service.String(), g.Key.Service.Protocol.String()
	}
	if g.Key.Client.IsValid() {
		out.Client = g.Key.Client.String()
	}
	if g.Key.Endpoint.IsValid() {
		out.Endpoint = g.Key.Endpoint.String()
	}
	if ep := g.Endpoint; ep != nil {
		out.Pod, out.Node, out.Zone = ep.PodName(), ep.Node(), ep.Zone()
	}
	return out
}
