package main

import (
	"fmt"
	"sync"

	"github.com/go-logr/logr"
	"github.com/rs/zerolog"
	"k8s.io/klog/v2"
)

// quietKlog sends the log of the Kubernetes libraries to ours, at the debug level:
// package kubernetes logs what matters in one line, while the libraries repeat it
// with each attempt. Only the first call has an effect: klog has one logger for the
// process, which must not change while a client runs.
func quietKlog(log zerolog.Logger) {
	setKlog.Do(func() {
		klog.SetLogger(logr.New(klogSink{log: log.With().Str("library", "client-go").Logger()}))
	})
}

var setKlog sync.Once

// klogSink is a logr.LogSink that writes to our log.
type klogSink struct{ log zerolog.Logger }

var _ logr.LogSink = klogSink{}

func (klogSink) Init(logr.RuntimeInfo) {}

// Enabled lets through what libraries say at their ordinary levels.
func (s klogSink) Enabled(level int) bool {
	return level <= 2 && s.log.GetLevel() <= zerolog.DebugLevel
}

func (s klogSink) Info(_ int, msg string, pairs ...any) {
	withPairs(s.log.Debug(), pairs).Msg(msg)
}

func (s klogSink) Error(err error, msg string, pairs ...any) {
	withPairs(s.log.Debug().Err(err), pairs).Msg(msg)
}

func (s klogSink) WithValues(pairs ...any) logr.LogSink {
	c := s.log.With()
	for i := 0; i+1 < len(pairs); i += 2 {
		c = c.Str(fmt.Sprint(pairs[i]), fmt.Sprint(pairs[i+1]))
	}
	return klogSink{log: c.Logger()}
}

func (s klogSink) WithName(string) logr.LogSink { return s }

func withPairs(e *zerolog.Event, pairs []any) *zerolog.Event {
	for i := 0; i+1 < len(pairs); i += 2 {
		e = e.Str(fmt.Sprint(pairs[i]), fmt.Sprint(pairs[i+1]))
	}
	return e
}
