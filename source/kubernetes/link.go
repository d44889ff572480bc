package kubernetes

import (
	"cmp"
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/rs/zerolog"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// link tracks whether the API server answers, and logs when that changes. Safe for
// concurrent use.
type link struct {
	log  zerolog.Logger
	host string

	mu      sync.Mutex
	broken  map[string]bool     // kinds whose last request did not get through
	refused map[string]*refusal // kinds that the server refused last
	known   map[string]bool     // kinds that were listed before
	trips   map[string]error    // kinds whose last request met no server, and why
	since   time.Time           // when the first of broken broke
	errors  uint64
	relists uint64
}

// refusal is the state of a kind that the server does not let us read.
type refusal struct {
	since  time.Time
	logged map[string]bool // its texts that are in the log
}

// mostRefusals bounds the logged texts of one kind: the rights to list and to watch
// have one each.
const mostRefusals = 4

// misgiving is how long a server may refuse what it has allowed before without a
// log line: a server that has just started does not know anybody's rights.
const misgiving = 5 * time.Second

func newLink(log zerolog.Logger, host string) *link {
	return &link{log: log, host: host, broken: make(map[string]bool), refused: make(map[string]*refusal), known: make(map[string]bool), trips: make(map[string]error)}
}

// tripped notes how one attempt of a request for a kind ended: err is nil once the
// server has answered anything. After timeouts, client-go makes up to ten attempts
// without reporting them.
func (l *link) tripped(ctx context.Context, kind string, err error) {
	if ctx.Err() != nil {
		return // we broke it off
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trips[kind] = err
	if err != nil {
		l.errors++
		l.breakLocked(kind, err)
	}
}

// answered notes how a request for a kind ended, and returns its error. When all
// attempts to begin a watch have timed out, client-go returns no error, but a watch
// that ends at once.
func (l *link) answered(ctx context.Context, kind string, err error) error {
	if ctx.Err() != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if trip := l.trips[kind]; trip != nil { // which is noted already
		return cmp.Or(err, trip)
	}
	l.answeredLocked(kind, err)
	return err
}

func (l *link) answeredLocked(kind string, err error) {
	if err == nil {
		l.clearLocked(kind)
		return
	}
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // a new list follows by itself
	}
	l.errors++
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err) {
		r := l.refused[kind]
		if r == nil {
			r = &refusal{since: time.Now(), logged: make(map[string]bool)}
			l.refused[kind] = r
		}
		text := err.Error()
		if !r.logged[text] && len(r.logged) < mostRefusals && (!l.known[kind] || time.Since(r.since) >= misgiving) {
			r.logged[text] = true
			l.log.Error().Err(err).Str("server", l.host).
				Msg("the API server does not show us the " + kind + "; see deploy/ for the rights that are needed")
		}
		return
	}
	l.breakLocked(kind, err)
}

func (l *link) breakLocked(kind string, err error) {
	if !l.broken[kind] {
		if len(l.broken) == 0 {
			l.since = time.Now()
			l.log.Warn().Err(err).Str("server", l.host).
				Msg("the API server cannot be reached; what is in force stays, and it is tried again")
		}
		l.broken[kind] = true
	}
}

func (l *link) clearLocked(kind string) {
	if r := l.refused[kind]; r != nil {
		delete(l.refused, kind)
		if len(r.logged) > 0 {
			l.log.Info().Str("server", l.host).Msg("the API server shows us the " + kind + " now")
		}
	}
	if l.broken[kind] {
		delete(l.broken, kind)
		if len(l.broken) == 0 {
			l.log.Info().Str("server", l.host).Dur("after", time.Since(l.since)).Msg("the API server is reached again")
		}
	}
}

// listed notes that all objects of a kind were listed. After the first time, the
// reason is that a watch could not continue where it was.
func (l *link) listed(kind string, changed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.known[kind] {
		l.known[kind] = true
		return
	}
	l.relists++
	l.log.Info().Str("server", l.host).Int("changed", changed).
		Msg("watching the " + kind + " could not go on where it was: all of them were listed anew")
}

// restored logs that the server's store is at an older version than a watch had reached.
func (l *link) restored(kind string, theirs, ours uint64) {
	l.log.Warn().Str("server", l.host).Uint64("version", theirs).Uint64("last", ours).
		Msg("the API server's store was restored to an older version: all " + kind + " are listed anew")
}

// forget drops a kind that is no longer watched.
func (l *link) forget(kind string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.refused, kind)
	delete(l.broken, kind)
	delete(l.trips, kind)
}

// stats returns the part of a Source's Stats that is about its link.
func (l *link) stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	refused := len(l.refused)
	if l.refused[podsKind] != nil { // names are missing, and nothing else
		refused--
	}
	return Stats{Connected: len(l.broken) == 0 && refused == 0, Errors: l.errors, Relists: l.relists}
}

// asker receives the results of a request's attempts; it travels in the request's
// context.
type asker struct {
	link *link
	kind string
}

type askerKey struct{}

func (a asker) context(ctx context.Context) context.Context {
	return context.WithValue(ctx, askerKey{}, a)
}

// attempts is a RoundTripper that reports the result of each attempt to its asker.
type attempts struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (a attempts) RoundTrip(r *http.Request) (*http.Response, error) {
	begin := time.Now()
	response, err := a.RoundTripper.RoundTrip(r)
	if err == nil && r.URL.Query().Get("watch") != "" {
		registerRequests().began(r, time.Since(begin))
	}
	if who, ok := r.Context().Value(askerKey{}).(asker); ok {
		who.link.tripped(r.Context(), who.kind, err)
	}
	return response, err
}

// WrappedRoundTripper lets client-go find the RoundTripper below.
func (a attempts) WrappedRoundTripper() http.RoundTripper { return a.RoundTripper }
