package kubernetes

import (
	"context"
	"sync"

	"github.com/rs/zerolog"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// link knows how it stands with the API server, and says so when that changes.
// Safe for concurrent use.
type link struct {
	log  zerolog.Logger
	host string

	mu      sync.Mutex
	broken  map[string]bool   // kinds whose last request did not get through
	refused map[string]string // kinds that the server refused last, with the reason
	errors  uint64
}

func newLink(log zerolog.Logger, host string) *link {
	return &link{log: log, host: host, broken: make(map[string]bool), refused: make(map[string]string)}
}

// answered takes note of how a request for a kind ended.
func (l *link) answered(ctx context.Context, kind string, err error) {
	if ctx.Err() != nil {
		return // we broke it off
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.clearLocked(kind)
		return
	}
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // a new list follows by itself
	}
	l.errors++
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err) {
		if text := err.Error(); l.refused[kind] != text {
			l.refused[kind] = text
			l.log.Error().Err(err).Str("server", l.host).
				Msg("the API server does not show us the " + kind + "; see deploy/ for the rights that are needed")
		}
		return
	}
	if !l.broken[kind] {
		if len(l.broken) == 0 {
			l.log.Warn().Err(err).Str("server", l.host).
				Msg("the API server cannot be reached; what is in force stays, and it is tried again")
		}
		l.broken[kind] = true
	}
}

func (l *link) clearLocked(kind string) {
	if l.refused[kind] != "" {
		delete(l.refused, kind)
		l.log.Info().Str("server", l.host).Msg("the API server shows us the " + kind + " now")
	}
	if l.broken[kind] {
		delete(l.broken, kind)
		if len(l.broken) == 0 {
			l.log.Info().Str("server", l.host).Msg("the API server is reached again")
		}
	}
}

// forget drops a kind that is no longer watched.
func (l *link) forget(kind string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.refused, kind)
	delete(l.broken, kind)
}

// state tells whether all requests got through when they were last made, and
// how many did not so far.
func (l *link) state() (connected bool, errors uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.broken) == 0 && len(l.refused) == 0, l.errors
}
