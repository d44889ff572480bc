package serve

import (
	"cmp"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
)

// history answers with the rates of the last minutes.
func (h *Handler) history(_ *http.Request, q *params) (any, error) {
	asked, err := historyQuestion(q)
	if err != nil {
		return nil, err
	}
	window, err := h.options.History.Read(asked)
	if err != nil {
		return nil, err
	}
	out := &api.History{
		Began: window.Began.UTC(), Times: []float64{}, Seconds: []float64{}, Lost: []uint64{}, LeftOut: []uint64{},
		Matched: window.Matched, Series: []api.Series{},
	}
	for _, n := range window.Intervals {
		out.Times = append(out.Times, float64(n.Time.UnixMilli())/1000)
		out.Seconds = append(out.Seconds, rounded(n.Length.Seconds()))
		out.Lost, out.LeftOut = append(out.Lost, n.Lost), append(out.LeftOut, n.LeftOut)
	}
	for i := range window.Series {
		out.Series = append(out.Series, seriesOf(&window.Series[i], window.Intervals))
	}
	return out, nil
}

// historyQuestion reads the parameters of a request for the history.
func historyQuestion(p *params) (q live.Question, err error) {
	name, endpoint := p.service(), p.Get("endpoint")
	switch by := cmp.Or(p.Get("by"), "total"); by {
	case "service":
		if q.By = live.ByService; endpoint != "" {
			return q, wrong("by=service is of all endpoints: use by=endpoint")
		}
	case "endpoint":
		q.By = live.ByService | live.ByEndpoint
	case "total":
		if name != "" || endpoint != "" {
			return q, wrong("by=total is of all connections: use by=service or by=endpoint")
		}
	default:
		return q, wrong("by %q: not one of endpoint, service, total", by)
	}
	var only netip.AddrPort // as an address may be written in several ways
	if endpoint != "" {
		ep, err := netip.ParseAddrPort(endpoint)
		if err != nil {
			return q, wrong("parameter endpoint: %q is not an address and port", endpoint)
		}
		only = netip.AddrPortFrom(ep.Addr().Unmap(), ep.Port())
	}
	q.Match = func(s *live.SeriesName) bool {
		return (name == "" || s.Service.String() == name || s.Service.Name.String() == name) &&
			(endpoint == "" || s.Endpoint == only)
	}
	q.Sort = cmp.Or(p.Get("sort"), "opened")
	if !slices.Contains(live.Ratings(), q.Sort) {
		return q, wrong("sort %q: not one of %s", q.Sort, strings.Join(live.Ratings(), ", "))
	}
	q.Since = p.since()
	q.Limit = p.number("limit", api.DefaultRows, api.MaxSeries)
	return q, p.err
}

// rounded keeps three digits behind the point.
func rounded(f float64) float64 { return math.Round(f*1000) / 1000 }

func seriesOf(s *live.Series, intervals []live.Interval) api.Series {
	n := len(s.Points)
	out := api.Series{
		Pod: s.Pod, Node: s.Node, Zone: s.Zone,
		Open: make([]uint32, n), Opened: make([]float64, n), Failed: make([]float64, n), FailedAttempts: make([]float64, n),
		BytesFromClient: make([]float64, n), BytesFromEndpoint: make([]float64, n),
		ConnectP50US: make([]uint32, n), ConnectP99US: make([]uint32, n),
		FirstP50US: make([]uint32, n), FirstP99US: make([]uint32, n),
	}
	if s.Service.Name.Name != "" {
		out.Service, out.Protocol = s.Service.String(), s.Service.Protocol.String()
	}
	if s.Endpoint.IsValid() {
		out.Endpoint = s.Endpoint.String()
	}
	for i, p := range s.Points {
		per := func(n float64) float64 { return rounded(n / intervals[i].Length.Seconds()) }
		out.Open[i] = p.Open
		out.Opened[i], out.Failed[i], out.FailedAttempts[i] = per(float64(p.Opened)), per(float64(p.Failed)), per(float64(p.FailedAttempts))
		out.BytesFromClient[i], out.BytesFromEndpoint[i] = per(float64(p.FromClient)), per(float64(p.FromEndpoint))
		out.ConnectP50US[i], out.ConnectP99US[i] = p.ConnectP50, p.ConnectP99
		out.FirstP50US[i], out.FirstP99US[i] = p.FirstP50, p.FirstP99
	}
	return out
}
