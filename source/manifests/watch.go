package manifests

import (
	"context"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/service"
)

// DefaultMaxFileSize is the size in bytes up to which a file is read.
const DefaultMaxFileSize = 4 << 20

const (
	// quietTime is the pause in events before the tree is looked at; maxDelay
	// bounds how long events can delay that.
	quietTime = 15 * time.Millisecond
	maxDelay  = 50 * time.Millisecond
	// rescanTime is how often the tree is looked at without events, as some file
	// systems have none and events can be lost.
	rescanTime = 10 * time.Second
	// slowLook is how long a look may take until it is logged.
	slowLook = time.Minute
	// pollTime is how often it is if the system reports no events, or there is
	// no directory. Looks take at most a tenth of the time.
	pollTime  = 50 * time.Millisecond
	pollShare = 10
)

// Options configure a Watcher. The zero value is ready.
type Options struct {
	// Logger receives errors in files, once for each content, and warnings.
	Logger zerolog.Logger
	// MaxFileSize is the size in bytes above which a file is not read
	// (--max-manifest-size). 0 means DefaultMaxFileSize.
	MaxFileSize int64
	// Annotation returns what is wrong with the value of an annotation of a Service,
	// given without the prefix "sluice.dev/". nil means that any value is right.
	Annotation func(name, value string) error
	// Allocate are the ranges of which Services without a cluster IP get one, at most one
	// of each family. Without any, such Services are not served.
	Allocate []netip.Prefix

	// inspects says that Inspect reads: it wants all findings, and what other kinds say of
	// pods.
	inspects bool
}

// Watcher reads and watches a directory of manifests. Its Run may be called
// once; Stats may be called at any time by any goroutine.
type Watcher struct {
	dir         string
	log         zerolog.Logger
	maxFileSize int64
	rescanTime  time.Duration
	emptyGrace  time.Duration
	options     Options
	newNotifier func() (notifier, error)
	calls       calls
	inherit     func(dir string, names []string) []Kept // nil: there is nobody to ask

	// What follows belongs to Run's goroutine.
	watches *watches
	mu      sync.Mutex // for changes of files and catalog, which Keep and Where read
	files   map[string]*fileState
	catalog *catalog
	told    map[string]bool // trouble with the tree that was told
	root    once.Trouble    // with the directory itself
	lines   once.Lines      // about each file

	stats atomic.Pointer[Stats]
}

// New makes a Watcher of the manifests below dir.
func New(dir string, opts Options) *Watcher {
	if opts.MaxFileSize <= 0 {
		opts.MaxFileSize = DefaultMaxFileSize
	}
	// The watches' names must not depend on the working directory.
	if a, err := filepath.Abs(dir); err == nil {
		dir = a
	}
	w := &Watcher{
		dir:         dir,
		log:         opts.Logger,
		maxFileSize: opts.MaxFileSize,
		rescanTime:  rescanTime,
		emptyGrace:  emptyGrace,
		newNotifier: newNotifier,
		options:     opts,
		files:       make(map[string]*fileState),
		catalog:     newCatalog(opts.Allocate),
		told:        make(map[string]bool),
	}
	w.stats.Store(&Stats{})
	return w
}

// Run reads the directory and calls apply with everything in it, even if that is
// nothing. Then it watches, and calls apply with each difference. It returns nil when
// ctx ends, and an error if the directory cannot be read at the start. One goroutine
// calls apply.
//
// If the directory disappears later, its last content stays in force until it is
// back. If a file system does not answer, Run ends a second after ctx.
func (w *Watcher) Run(ctx context.Context, apply func(service.Change)) error {
	done := make(chan error, 1)
	go func() {
		done <- w.run(ctx, func(c service.Change) {
			if ctx.Err() == nil {
				apply(c)
			}
		})
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(time.Second):
		return nil
	}
}

func (w *Watcher) run(ctx context.Context, apply func(service.Change)) error {
	w.watches = newWatches(w.dir, w.newNotifier)
	defer func() { w.watches.close() }()

	first := true
	var pending time.Time // when the first event came that was not looked at
	for {
		start := time.Now()
		slow := time.AfterFunc(slowLook, func() {
			w.log.Warn().Str("directory", w.dir).Msg("manifests: reading the directory takes long; what was read last stays in force")
		})
		again, err := w.look(start, first, apply)
		slow.Stop()
		if err != nil && first {
			return err
		}
		first, pending = false, time.Time{}
		w.watchTrouble()
		wait := w.nextLook(err != nil, time.Since(start))
		if again {
			wait = 0
		}
		timer := time.NewTimer(wait)
	events:
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-timer.C:
				break events
			case ev := <-w.watches.events():
				if !w.watches.event(ev) {
					continue
				}
			case err := <-w.watches.lost:
				w.watches.anything()
				w.log.Debug().Err(err).Str("directory", w.dir).Msg("watching manifests: events were lost")
			}
			now := time.Now()
			if pending.IsZero() {
				pending = now
			}
			timer.Reset(min(quietTime, pending.Add(maxDelay).Sub(now)))
		}
	}
}

// nextLook returns the time until the next look without an event.
func (w *Watcher) nextLook(noDirectory bool, took time.Duration) time.Duration {
	wait := w.rescanTime
	if noDirectory || w.watches.failed != nil {
		wait = min(wait, max(pollTime, pollShare*took))
	}
	for _, st := range w.files {
		if !st.emptySince.IsZero() {
			wait = min(wait, max(time.Until(st.emptySince.Add(w.emptyGrace)), 0))
		}
	}
	if since, waiting := w.catalog.oldestStray(); waiting {
		wait = min(wait, max(time.Until(since.Add(strayGrace)), 0))
	}
	return wait
}

// watchTrouble logs when the system stops and starts to report events.
func (w *Watcher) watchTrouble() {
	switch failed := w.watches.failed; {
	case failed != nil && !w.watches.toldFailed:
		w.watches.toldFailed = true
		w.log.Warn().Err(failed).Str("directory", w.dir).
			Msg("the system gives no events for all manifests: looking at them every so often (see fs.inotify.max_user_watches and max_user_instances)")
	case failed == nil && w.watches.toldFailed:
		w.watches.toldFailed = false
		w.log.Info().Str("directory", w.dir).Msg("the system gives events for manifests again")
	}
}
