package manifests

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
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

// newNotifier makes a notifier of the system's. The buffer is for bursts; the
// kernel's own queue is much longer.
func newNotifier() (notifier, error) {
	w, err := fsnotify.NewBufferedWatcher(256)
	if err != nil {
		return nil, err
	}
	return fsNotifier{w}, nil
}

// maxTouched is how many names of changed files are remembered between two
// looks; with more, all files are read.
const maxTouched = 4096

// watches keeps the directories watched that matter: those of the tree, and
// others in which a symlink or its target can be replaced. An event is only a
// hint to look at the tree; what changed is found there.
type watches struct {
	root string
	make func() (notifier, error)
	n    notifier // nil when the system has none to give
	// tried is when making a notifier was tried last.
	tried      time.Time
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
	if w.n != nil {
		_ = w.n.Close() // nothing depends on it any more
	}
}

// events gives nil, on which a receive waits for ever, when there are none.
func (w *watches) events() <-chan fsnotify.Event {
	if w.n == nil {
		return nil
	}
	return w.n.events()
}

func (w *watches) errors() <-chan error {
	if w.n == nil {
		return nil
	}
	return w.n.errors()
}

// relevant tells whether an event can mean that manifests changed.
func (w *watches) relevant(ev fsnotify.Event) bool {
	if ev.Name == "" {
		return false
	}
	base := filepath.Base(ev.Name)
	if isManifest(base) {
		return true
	}
	if names, ok := w.foreign[filepath.Dir(ev.Name)]; ok && !w.tree[filepath.Dir(ev.Name)] {
		return names[base]
	}
	// Whatever else is written to cannot matter, but directories and symlinks
	// of any name that come and go can.
	return ev.Has(fsnotify.Create) || ev.Has(fsnotify.Remove) || ev.Has(fsnotify.Rename)
}

// touch remembers that a file had an event.
func (w *watches) touch(name string) {
	if len(w.touched) >= maxTouched {
		w.touchAll()
		return
	}
	w.touched[name] = true
}

func (w *watches) touchAll() { w.all = true }

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
	if w.n == nil && (w.tried.IsZero() || now.Sub(w.tried) >= rescanTime) {
		w.tried = now
		w.n, w.failed = w.make()
	} else if w.n == nil {
		w.failed = errors.New("inotify is not to be had")
	}
}

// add watches a directory. A directory that is gone is not a failure: its
// parent's event is on its way.
func (w *watches) add(dir string) {
	if w.n == nil {
		return
	}
	if err := w.n.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
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
		if w.n != nil {
			_ = w.n.Remove(dir) // gone with the directory, as a rule
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
	if real, err := filepath.EvalSymlinks(w.root); err == nil {
		add(real)
	}
	for i := range t.files {
		if target := t.files[i].target; target != "" && !strings.HasPrefix(target, "/proc/") {
			add(target)
		}
	}
	return out
}
