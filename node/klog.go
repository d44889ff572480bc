package node

import (
	"context"
	"log/slog"
	"sync"

	"github.com/rs/zerolog"
	"k8s.io/klog/v2"
)

// quietKlog sends the log of the Kubernetes libraries to ours, at the debug level:
// package kubernetes logs what matters in one line, while the libraries repeat it
// with each attempt. Only the first call has an effect: klog has one logger for the
// process, which must not change while a client runs.
func quietKlog(log zerolog.Logger) {
	setKlog.Do(func() {
		klog.SetSlogLogger(slog.New(quiet{zerolog.NewSlogHandler(log.With().Str("library", "client-go").Logger())}))
	})
}

var setKlog sync.Once

// quiet logs everything at the debug level.
type quiet struct{ slog.Handler }

// mostDetail is the level of what libraries say at their own verbosity 2; they say
// more at higher ones.
const mostDetail = slog.Level(-2)

func (q quiet) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= mostDetail && q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(attrs)} }
func (q quiet) WithGroup(string) slog.Handler            { return q }
