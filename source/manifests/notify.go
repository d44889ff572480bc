package manifests

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// notifier reports events of directories. Adding a directory again is no error, and
// detects that it was replaced by another.
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

// Remove removes the watch of a directory. fsnotify (1.10.1) panics if another watched
// directory was renamed to this name and added under it: its maps then name a watch
// that no longer exists. By then it has removed the directory and released its lock,
// so nothing is left to do.
func (n fsNotifier) Remove(dir string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("watch of %s: %v", dir, r)
		}
	}()
	return n.Watcher.Remove(dir)
}

// newNotifier opens the system's notifier. The buffer is for bursts; the kernel's own
// queue is much longer.
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

// losses passes on why a notifier lost events. It takes the notifier's errors without
// delay: fsnotify may hold its lock while an error waits to be received, and adding a
// directory needs that lock.
func losses(n notifier, done <-chan struct{}) <-chan error {
	lost := make(chan error, 1)
	go func() {
		for {
			select {
			case err := <-n.errors():
				select {
				case lost <- err:
				default: // one is enough
				}
			case <-done:
				return
			}
		}
	}()
	return lost
}

// watches watches the directories of the tree, and others in which a symlink or its
// target can be replaced. An event only triggers a look at the tree, which finds what
// has changed. It belongs to Run's goroutine.
type watches struct {
	root   string
	make   func() (notifier, error)
	system notifier      // nil when the system has none to give
	lost   <-chan error  // gives why events of system were lost: anything may have changed
	done   chan struct{} // ends what feeds lost
	// tried is when a notifier was last opened, or failed to open.
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
	return &watches{root: root, make: newNotifier, done: make(chan struct{}), touched: make(map[string]bool)}
}

func (w *watches) close() {
	close(w.done)
	if w.system != nil {
		_ = w.system.Close() // nothing depends on it any more
	}
}

// events returns nil, from which a receive never returns, if there is no notifier.
func (w *watches) events() <-chan fsnotify.Event {
	if w.system == nil {
		return nil
	}
	return w.system.events()
}

// event takes an event and reports whether it is a reason to look at the tree.
func (w *watches) event(ev fsnotify.Event) bool {
	if !w.relevant(ev.Name, ev.Op) {
		return false
	}
	w.touched[ev.Name] = true
	if len(w.touched) > maxTouched {
		w.anything()
	}
	return true
}

// anything notes that any file may have changed.
func (w *watches) anything() {
	w.all = true
	clear(w.touched)
}

// relevant reports whether an event can mean that manifests changed.
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
	// Writes to other files do not matter, but new or deleted directories and
	// symlinks of any name do.
	return op.Has(fsnotify.Create) || op.Has(fsnotify.Remove) || op.Has(fsnotify.Rename)
}

// take returns a function that reports whether a file had an event since the last
// take.
func (w *watches) take() func(name string) bool {
	touched, all := w.touched, w.all
	w.touched, w.all = make(map[string]bool), false
	return func(name string) bool { return all || touched[name] }
}

// begin starts a look at the tree.
func (w *watches) begin(now time.Time) {
	w.failed = nil
	if w.system != nil {
		return
	}
	if w.tried.IsZero() || now.Sub(w.tried) >= rescanTime {
		w.tried = now
		n, err := w.make()
		if err == nil {
			w.system, w.lost = n, losses(n, w.done)
		}
		w.lastMake = err
	}
	w.failed = w.lastMake
}

// add watches a directory. A deleted directory is no failure: its parent has an
// event.
func (w *watches) add(dir string) {
	if w.system == nil {
		return
	}
	if err := w.system.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		w.failed = err
	}
}

// end finishes a look: it watches directories outside of the tree and removes
// obsolete watches. It reports whether the tree must be looked at again because a
// watch was set or removed after the walk.
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
		if w.system != nil {
			_ = w.system.Remove(dir) // gone with the directory, as a rule
		}
		again = true
	}
	return again
}

// outside returns directories outside of the tree, each with the names that matter in
// it: symlinks on the path of the root, the root itself, targets of symlinked files.
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
