package manifests

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// notifier gives events of directories. Adding a directory again is no error
// and finds out when another directory has taken its place.
type notifier interface {
	Add(dir string) error
	Remove(dir string) error
	Close() error
	events() <-chan fsnotify.Event
	errors() <-chan error
}

type fsNotifier struct{ *fsnotify.Watcher }

func (n fsNotifier) events() <-chan fsnotify.Event { return n.Events }
func (n fsNotifier) errors() <-chan error          { return n.Errors }

// Remove takes the watch of a directory away. fsnotify panics where another
// watched directory was renamed to the one's name and added under it: its maps
// then name a watch that it has not any more (1.10.1). It has forgotten the
// directory by then and let go of its lock, so that there is nothing left to do.
func (n fsNotifier) Remove(dir string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("watch of %s: %v", dir, r)
		}
	}()
	return n.Watcher.Remove(dir)
}

// newNotifier makes a notifier of the system's. The buffer is for bursts; the
// kernel's own queue is much longer.
func newNotifier() (notifier, error) {
	w, err := fsnotify.NewBufferedWatcher(256)
	if err != nil {
		return nil, err
	}
	return fsNotifier{w}, nil
}

// maxTouched is how many names with events are remembered between two looks;
// with more, all files are read.
const maxTouched = 4096

// inbox takes a notifier's events in, always at once: fsnotify may hold its lock
// while it waits for somebody to take an error, and adding a directory waits
// for that lock. What comes in is merged, so there is an end to it.
type inbox struct {
	n    notifier
	wake chan struct{} // has something in it while there is news
	done chan struct{}
	gone chan struct{}

	mu   sync.Mutex
	news news
}

// news is what the notifier had to say.
type news struct {
	ops  map[string]fsnotify.Op // by name
	lost bool                   // events were lost: anything may have changed
	errs []error
}

func newInbox(n notifier) *inbox {
	in := &inbox{n: n, wake: make(chan struct{}, 1), done: make(chan struct{}), gone: make(chan struct{})}
	go in.run()
	return in
}

func (in *inbox) run() {
	defer close(in.gone)
	events, errs := in.n.events(), in.n.errors()
	for {
		select {
		case <-in.done:
			return
		case ev, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			in.event(ev)
		case err, ok := <-errs:
			if !ok {
				errs = nil
				continue
			}
			in.err(err)
		}
		select {
		case in.wake <- struct{}{}:
		default:
		}
	}
}

func (in *inbox) event(ev fsnotify.Event) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.news.ops == nil {
		in.news.ops = make(map[string]fsnotify.Op)
	}
	if _, ok := in.news.ops[ev.Name]; !ok && len(in.news.ops) >= maxTouched {
		in.news.lost = true
		return
	}
	in.news.ops[ev.Name] |= ev.Op
}

func (in *inbox) err(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.news.lost = true
	if !errors.Is(err, fsnotify.ErrEventOverflow) && len(in.news.errs) < maxFindings {
		in.news.errs = append(in.news.errs, err)
	}
}

// take gives what came in since the last time.
func (in *inbox) take() news {
	in.mu.Lock()
	defer in.mu.Unlock()
	n := in.news
	in.news = news{}
	return n
}

func (in *inbox) close() {
	_ = in.n.Close() // nothing depends on it any more
	close(in.done)
	<-in.gone
}

// watches keeps the directories watched that matter: those of the tree, and
// others in which a symlink or its target can be replaced. An event is only a
// hint to look at the tree; what changed is found there. It belongs to Run's
// goroutine.
type watches struct {
	root string
	make func() (notifier, error)
	in   *inbox // nil when the system has no notifier to give
	// tried is when making a notifier was tried last.
	tried      time.Time
	lastMake   error // what came of that
	failed     error // why there may be changes without events; nil if all is well
	toldFailed bool

	tree    map[string]bool            // directories whose every change matters
	foreign map[string]map[string]bool // others, with the names that matter in them

	touched map[string]bool // files that had events since the last look
	all     bool            // any file may have changed
}

func newWatches(root string, newNotifier func() (notifier, error)) *watches {
	return &watches{root: root, make: newNotifier, touched: make(map[string]bool)}
}

func (w *watches) close() {
	if w.in != nil {
		w.in.close()
	}
}

// wake gives nil, on which a receive waits for ever, when there is no notifier.
func (w *watches) wake() <-chan struct{} {
	if w.in == nil {
		return nil
	}
	return w.in.wake
}

// news takes in what the notifier had to say and tells whether it is a reason
// to look at the tree.
func (w *watches) news() (look bool, errs []error) {
	n := w.in.take()
	for name, op := range n.ops {
		if w.relevant(name, op) {
			w.touched[name] = true
			look = true
		}
	}
	if n.lost || len(w.touched) > maxTouched {
		w.all, look = true, true
		clear(w.touched)
	}
	return look, n.errs
}

// relevant tells whether an event can mean that manifests changed.
func (w *watches) relevant(name string, op fsnotify.Op) bool {
	if name == "" {
		return false
	}
	dir, base := filepath.Dir(name), filepath.Base(name)
	if isManifest(base) {
		return true
	}
	if names, ok := w.foreign[dir]; ok && !w.tree[dir] {
		return names[base]
	}
	// Whatever else is written to cannot matter, but directories and symlinks
	// of any name that come and go can.
	return op.Has(fsnotify.Create) || op.Has(fsnotify.Remove) || op.Has(fsnotify.Rename)
}

// take gives a function that tells whether a file had an event since the last
// take.
func (w *watches) take() func(name string) bool {
	touched, all := w.touched, w.all
	w.touched, w.all = make(map[string]bool), false
	return func(name string) bool { return all || touched[name] }
}

// begin starts a look at the tree.
func (w *watches) begin(now time.Time) {
	w.failed = nil
	if w.in != nil {
		return
	}
	if w.tried.IsZero() || now.Sub(w.tried) >= rescanTime {
		w.tried = now
		n, err := w.make()
		if err == nil {
			w.in = newInbox(n)
		}
		w.lastMake = err
	}
	w.failed = w.lastMake
}

// add watches a directory. A directory that is gone is not a failure: its
// parent's event is on its way.
func (w *watches) add(dir string) {
	if w.in == nil {
		return
	}
	if err := w.in.n.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		w.failed = err
	}
}

// end finishes a look: it watches what lies outside of the tree and no longer
// watches what was left. It tells whether the tree must be looked at again
// because a watch was set, or taken away, after the walk.
func (w *watches) end(t tree) bool {
	was := make(map[string]bool, len(w.tree)+len(w.foreign))
	for dir := range w.tree {
		was[dir] = true
	}
	for dir := range w.foreign {
		was[dir] = true
	}
	w.tree = make(map[string]bool, len(t.dirs))
	for _, dir := range t.dirs {
		w.tree[dir] = true
		delete(was, dir)
	}
	again := false
	w.foreign = w.outside(t)
	for dir := range w.foreign {
		if w.tree[dir] {
			continue
		}
		w.add(dir)
		again = again || !was[dir]
		delete(was, dir)
	}
	for dir := range was {
		if w.in != nil {
			_ = w.in.n.Remove(dir) // gone with the directory, as a rule
		}
		again = true
	}
	return again
}

// outside gives the directories outside of the tree in which a symlink on the
// way to the root, the root itself, or the target of a symlinked file can be
// replaced, with the names of these.
func (w *watches) outside(t tree) map[string]map[string]bool {
	out := make(map[string]map[string]bool)
	add := func(name string) {
		dir, base := filepath.Split(name)
		dir = filepath.Clean(dir)
		if out[dir] == nil {
			out[dir] = make(map[string]bool)
		}
		out[dir][base] = true
	}
	add(w.root)
	for p := w.root; p != filepath.Dir(p); p = filepath.Dir(p) {
		if info, err := os.Lstat(p); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			add(p)
		}
	}
	if resolved, err := filepath.EvalSymlinks(w.root); err == nil {
		add(resolved)
	}
	for i := range t.files {
		target := t.files[i].target
		if target == "" || strings.HasPrefix(target, "/proc/") {
			continue
		}
		// What changes behind more symlinks than that is found by the next look.
		if len(out) < maxLinkedDirs || out[filepath.Dir(target)] != nil {
			add(target)
		}
	}
	return out
}
