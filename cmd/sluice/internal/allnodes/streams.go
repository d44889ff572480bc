package allnodes

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/merge"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// follow calls line with each line of the nodes' streams, one at a time, until ctx ends or
// line returns an error. A node whose stream ends is followed again once it answers.
func (f *API) follow(ctx context.Context, path string, query url.Values, line func(node string, text []byte) error) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	var mu sync.Mutex // line is called under it
	var running sync.WaitGroup
	defer running.Wait()
	defer end(nil)
	followed := make(map[*node]bool)
	var ended = make(chan *node)
	for {
		for _, n := range f.answering() {
			if followed[n] {
				continue
			}
			followed[n] = true
			running.Go(func() {
				visit := func(text []byte) error {
					mu.Lock()
					defer mu.Unlock()
					err := line(n.Name, text)
					if err != nil {
						end(err)
					}
					return err
				}
				err := n.lines(ctx, path, query, visit)
				said := (*refusal)(nil)
				if errors.As(err, &said) && bytes.Contains(said.body, []byte(`parameter \"quiet\"`)) {
					older := maps.Clone(query)
					older.Del("quiet")
					err, said = n.lines(ctx, path, older, visit), nil // of a build that does not know it
				}
				switch {
				case ctx.Err() != nil:
				case errors.As(err, &said):
					end(said)
				default:
					f.note(n, cmp.Or(err, errEnded))
				}
				select {
				case ended <- n:
				case <-ctx.Done():
				}
			})
		}
		select {
		case n := <-ended:
			delete(followed, n)
		case <-time.After(time.Second): // is there another node?
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var errEnded = errors.New("its stream has ended")

// lines calls visit with each line of a stream.
func (n *node) lines(ctx context.Context, path string, query url.Values, visit func([]byte) error) error {
	body, err := n.open(ctx, path, query)
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for lines.Scan() {
		if err := visit(lines.Bytes()); err != nil {
			return err
		}
	}
	return lines.Err()
}

// writer writes lines to a browser.
type writer struct {
	http.ResponseWriter
	begun bool
}

func (w *writer) line(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.begin()
	_, err = w.Write(append(printable.JSON(text), '\n'))
	return cmp.Or(err, http.NewResponseController(w.ResponseWriter).Flush())
}

func (w *writer) begin() {
	if !w.begun {
		head(w, "application/x-ndjson", http.StatusOK)
	}
	w.begun = true
}

// done returns what is still to be told to the browser.
func (w *writer) done(err error) error {
	if w.begun || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// tap has the records of all nodes as they come.
func (f *API) tap(w http.ResponseWriter, r *http.Request, query url.Values) error {
	if rate := number(query, "rate", 0); rate > 0 {
		n := max(len(f.answering()), 1)
		query.Set("rate", strconv.Itoa((rate+n-1)/n))
	}
	out := &writer{ResponseWriter: w}
	if _, err := ask[api.Connections](f, asking(r, api.PathConnections), url.Values{"filter": {query.Get("filter")}, "limit": {"0"}}, f.answering()); err != nil {
		return err // before the stream begins: a wrong filter
	}
	out.begin()
	if err := http.NewResponseController(w).Flush(); err != nil {
		return out.done(err)
	}
	return out.done(f.follow(r.Context(), r.URL.Path, query, func(node string, text []byte) error {
		c := &api.Connection{}
		if err := json.Unmarshal(text, c); err != nil {
			return err
		}
		c.ProxyNode = node
		return out.line(c)
	}))
}

// asking is a request for another path.
func asking(r *http.Request, path string) *http.Request {
	r = r.Clone(r.Context())
	r.URL.Path = path
	return r
}

// past has the records of all nodes, the oldest first.
func (f *API) past(w http.ResponseWriter, r *http.Request, query url.Values) error {
	limit := number(query, "limit", api.MaxRows)
	ctx, cancel := context.WithTimeout(r.Context(), f.timeout)
	defer cancel()
	rows := merge.List[api.Connection]{Compare: func(a, b *api.Connection) int { return ended(b).Compare(ended(a)) }, Limit: limit}
	var sum api.Past
	var refused *refusal
	var mu sync.Mutex // guards the above
	var asked sync.WaitGroup
	for _, n := range f.answering() {
		asked.Go(func() {
			var own []api.Connection
			var past api.Past
			err := n.lines(ctx, r.URL.Path, query, func(text []byte) error {
				c := api.Connection{}
				err := json.Unmarshal(text, &c)
				if c.Past != nil {
					past = *c.Past
				} else if err == nil {
					c.ProxyNode = n.Name
					own = append(own, c)
				}
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			if said := (*refusal)(nil); errors.As(err, &said) {
				refused = said
			}
			sum.Kept, sum.Lost = sum.Kept+past.Kept, sum.Lost+past.Lost
			if past.Since.After(sum.Since) {
				sum.Since = past.Since // from then on, all nodes have theirs
			}
			rows.Add(own)
		})
	}
	asked.Wait()
	if refused != nil && sum.Since.IsZero() {
		return refused
	}
	out := &writer{ResponseWriter: w}
	err := out.line(&struct {
		Past api.Past `json:"past"`
	}{sum})
	slices.Reverse(rows.Rows)
	for i := range rows.Rows {
		if err == nil {
			err = out.line(&rows.Rows[i])
		}
	}
	return out.done(err)
}

func ended(c *api.Connection) time.Time {
	return c.Time.Add(time.Duration(c.DurationUS) * time.Microsecond)
}

// fresh is how long a node's frame is among the sums.
const fresh = 3 * time.Second

// rates has a frame each second, of the nodes' last frames. A time is that of the node
// where it is longest: quantiles of several nodes cannot be merged.
func (f *API) rates(w http.ResponseWriter, r *http.Request, query url.Values) error {
	query.Set("interval", "1s")
	type last struct {
		frame api.Frame
		came  time.Time
	}
	var mu sync.Mutex // guards frames
	frames := make(map[string]last)
	ctx, end := context.WithCancelCause(r.Context())
	defer end(nil)
	var following sync.WaitGroup
	defer following.Wait()
	defer end(nil)
	following.Go(func() {
		end(f.follow(ctx, r.URL.Path, query, func(node string, text []byte) error {
			var l last
			if err := json.Unmarshal(text, &l.frame); err != nil {
				return err
			}
			l.came = time.Now()
			mu.Lock()
			defer mu.Unlock()
			frames[node] = l
			return nil
		}))
	})
	out := &writer{ResponseWriter: w}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return out.done(context.Cause(ctx))
		case now := <-tick.C:
			var all []api.Frame
			mu.Lock()
			for _, l := range frames {
				if now.Sub(l.came) < fresh {
					all = append(all, l.frame)
				}
			}
			mu.Unlock()
			if len(all) == 0 {
				continue
			}
			if err := out.line(sumOf(all, now, query.Get("sort"), number(query, "limit", api.DefaultRows))); err != nil {
				return out.done(err)
			}
		}
	}
}

// sumOf adds up frames of several nodes.
func sumOf(all []api.Frame, now time.Time, sort string, limit int) *api.Frame {
	type key struct{ service, protocol, endpoint, client, node string }
	sum := &api.Frame{Time: now.UTC(), Seconds: 1, By: all[0].By, Rows: []api.Rates{}}
	at := make(map[key]int) // in sum.Rows
	for i := range all {
		addRates(&sum.Total, &all[i].Total)
		sum.Lost += all[i].Lost
		sum.Groups = max(sum.Groups, all[i].Groups)
		for j := range all[i].Rows {
			row := &all[i].Rows[j]
			k := key{row.Service, row.Protocol, row.Endpoint, row.Client, row.Node}
			n, known := at[k]
			if !known {
				at[k] = len(sum.Rows)
				sum.Rows = append(sum.Rows, *row)
				continue
			}
			addRates(&sum.Rows[n], row)
		}
	}
	sum.Groups = max(sum.Groups, len(sum.Rows))
	order := merge.Rates(cmp.Or(sort, "opened"))
	slices.SortFunc(sum.Rows, func(a, b api.Rates) int { return order(&a, &b) })
	sum.Rows = sum.Rows[:min(limit, len(sum.Rows))]
	return sum
}

func addRates(sum, r *api.Rates) {
	sum.Open += r.Open
	sum.Connecting += r.Connecting
	sum.Opened += r.Opened
	sum.Ended += r.Ended
	sum.Failed += r.Failed
	sum.Broken += r.Broken
	sum.FailedAttempts += r.FailedAttempts
	sum.SavedAttempts += r.SavedAttempts
	sum.BytesFromClient += r.BytesFromClient
	sum.BytesFromEndpoint += r.BytesFromEndpoint
	sum.Answered += r.Answered
	sum.Unanswered += r.Unanswered
	sum.Waiting += r.Waiting
	sum.UnansweredUS = max(sum.UnansweredUS, r.UnansweredUS)
	sum.ConnectP50US = max(sum.ConnectP50US, r.ConnectP50US)
	sum.ConnectP99US = max(sum.ConnectP99US, r.ConnectP99US)
	sum.FirstP50US = max(sum.FirstP50US, r.FirstP50US)
	sum.FirstP99US = max(sum.FirstP99US, r.FirstP99US)
	sum.DurationP50US = max(sum.DurationP50US, r.DurationP50US)
	sum.DurationP99US = max(sum.DurationP99US, r.DurationP99US)
}
