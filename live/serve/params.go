package serve

import (
	"cmp"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
)

// params are the parameters of a request. err is the first error of all that were read:
// check it before any of them is used.
type params struct {
	url.Values
	err  error
	pods *pods
}

// readParams reads the parameters of a request, each at most once, and no others than
// those that are allowed.
func readParams(r *http.Request, allowed []string) *params {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return &params{err: wrong("the query of the URL: %w", err)}
	}
	for name, list := range values {
		if !slices.Contains(allowed, name) {
			return &params{err: wrong("parameter %q: not one of %s", name, strings.Join(allowed, ", "))}
		}
		if len(list) > 1 {
			return &params{err: wrong("parameter %q: given %d times", name, len(list))}
		}
	}
	return &params{Values: values}
}

func (q *params) note(err error) { q.err = cmp.Or(q.err, err) }

// filter reads the filter; the empty one selects all.
func (q *params) filter() *filter.Filter {
	f, err := filter.Parse(q.Get("filter"))
	return q.named(f, err)
}

// endedFilter is filter for records of connections that ended.
func (h *Handler) endedFilter(q *params) *filter.Filter {
	if h.options.TCP {
		return q.filter()
	}
	return q.recordFilter()
}

// recordFilter is filter for what is measured of records.
func (q *params) recordFilter() *filter.Filter {
	f, err := filter.ParseForRecords(q.Get("filter"))
	return q.named(f, err)
}

// named notes the error of a filter, or has the filter name clients.
func (q *params) named(f *filter.Filter, err error) *filter.Filter {
	q.note(err)
	if err == nil {
		q.pods.name(f)
	}
	return f
}

// number reads a number between 0 and a bound.
func (q *params) number(name string, missing, most int) int {
	text := q.Get(name)
	if text == "" {
		return missing
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > most {
		q.note(wrong("parameter %s: %q is not a number from 0 to %d", name, text, most))
	}
	return n
}

// since reads a time in Unix seconds; it is long ago if it is missing.
func (q *params) since() time.Time {
	text := q.Get("since")
	if text == "" {
		return time.Unix(0, 0)
	}
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil || !(seconds >= 0 && seconds < 1e11) {
		q.note(wrong("parameter since: %q is not a time in Unix seconds", text))
		return time.Time{}
	}
	// Times are given in milliseconds: one that was rounded down is not after itself.
	return time.UnixMilli(int64(math.Round(seconds*1000)) + 1)
}

// truth reads true or false; false if it is missing.
func (q *params) truth(name string) bool {
	text := cmp.Or(q.Get(name), "false")
	is, err := strconv.ParseBool(text)
	if err != nil {
		q.note(wrong("parameter %s: %q is not true or false", name, text))
	}
	return is
}

// endpoint reads an endpoint: an address and a port, or an address alone, which has port 0
// then and stands for all ports. It is invalid if it is missing.
func (q *params) endpoint() netip.AddrPort {
	text := q.Get("endpoint")
	if text == "" {
		return netip.AddrPort{}
	}
	ep, ok := parseEndpoint(text)
	if !ok {
		q.note(wrong("parameter endpoint: %q is not an address, or an address and port", text))
	}
	return ep
}

// service reads the name of a Service or of a port of it; empty if it is missing.
func (q *params) service() string {
	text := q.Get("service")
	if namespace, name, _ := strings.Cut(text, "/"); text != "" && (namespace == "" || name == "") {
		q.note(wrong("parameter service: %q is not namespace/name or namespace/name:port", text))
	}
	return text
}

func parseEndpoint(text string) (_ netip.AddrPort, ok bool) {
	if ep, err := netip.ParseAddrPort(text); err == nil {
		return netip.AddrPortFrom(ep.Addr().Unmap(), ep.Port()), true
	}
	a, err := netip.ParseAddr(text)
	return netip.AddrPortFrom(a.Unmap(), 0), err == nil
}

// page reads offset and limit.
func (q *params) page() (offset, limit int) {
	offset, limit = q.number("offset", 0, api.MaxRows), q.number("limit", api.DefaultRows, api.MaxRows)
	if offset+limit > api.MaxRows {
		q.note(wrong("offset and limit together are more than %d: use %s, or a narrower filter", api.MaxRows, api.PathStream))
	}
	return offset, limit
}
