package manifests

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// emptyGrace is how long an emptied file keeps its content:
	// "kubectl get … > file" empties it first.
	emptyGrace = 2 * time.Second
	// settleTime is how old a file's time stamp must be to be trusted: two writes
	// within one tick of the clock have the same stamp.
	settleTime = time.Second
)

// fileState is the state of a known file.
type fileState struct {
	info    fs.FileInfo
	readAt  time.Time
	sum     [sha256.Size]byte // of the data that was decoded last
	decoded bool              // sum is set
	bad     bool              // that data has errors
	trouble string            // why the file cannot be read; "" if it can
	why     string            // the first error, while it is in error
	good    content           // what is in force
	// emptySince is when the file was first seen empty after it had content.
	emptySince time.Time
}

func (st *fileState) inError() bool { return st.bad || st.trouble != "" }

// look walks the tree, reads what has changed and passes the difference on. again
// says that another look must follow at once. After an error, which is that of the
// directory itself, nothing has changed.
func (w *Watcher) look(now time.Time, first bool, apply func(service.Change)) (again bool, err error) {
	touched := w.watches.take()
	w.watches.begin(now)
	t, err := walk(w.dir, &w.calls, w.watches.add)
	if err == nil && len(w.missing(t)) > 0 {
		// A file that is moved during the walk may be seen at neither place. It
		// must not look deleted, so walk twice.
		t, err = walk(w.dir, &w.calls, w.watches.add)
	}
	if err != nil {
		w.watches.end(tree{}) // the parent is watched for its return
		if text := err.Error(); !first && w.root.New(text) {
			w.log.Error().Msgf("manifests: %s: what was read last stays in force", text)
		}
		return false, err
	}
	if w.root.Over() {
		w.log.Info().Str("directory", w.dir).Msg("manifests: the directory is back")
	}
	again = w.watches.end(t)
	w.tellOnce(t.findings)
	readings := w.read(t.files, touched)
	if first {
		w.takeKept(t, readings)
	}
	w.mu.Lock()
	w.forget(t)
	for i, r := range readings {
		w.take(now, &t.files[i], r)
	}
	change, findings := w.catalog.commit()
	findings = append(findings, w.catalog.strays(now, first)...)
	w.mu.Unlock()
	w.tell(findings, "")
	if first || !change.Empty() {
		w.publish(time.Now())
		apply(change)
	} else {
		w.publish(w.stats.Load().LastChange)
	}
	return again, nil
}

// tellOnce logs each finding about the tree once, while it lasts.
func (w *Watcher) tellOnce(findings []finding) {
	told := make(map[string]bool, len(findings))
	for _, f := range findings {
		text := f.String()
		if told[text] = true; !w.told[text] {
			w.log.Error().Msg(text)
		}
	}
	w.told = told
}

// forget removes the files that are no longer there.
func (w *Watcher) forget(t tree) {
	for _, name := range w.missing(t) {
		delete(w.files, name)
		w.catalog.set(name, nil)
	}
}

// missing returns the known files that are not in the tree, except those in
// directories that cannot be read.
func (w *Watcher) missing(t tree) []string {
	there := make(map[string]bool, len(t.files))
	for i := range t.files {
		there[t.files[i].path] = true
	}
	var names []string
	for name := range w.files {
		if !there[name] && !below(name, t.kept) {
			names = append(names, name)
		}
	}
	return names
}

// below reports whether a file is below one of the directories.
func below(name string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(name, dir+"/") })
}

// reading is the result of reading a file.
type reading struct {
	unread   bool // there was no need to
	info     fs.FileInfo
	readAt   time.Time
	err      error
	empty    bool
	sum      [sha256.Size]byte
	same     bool // as what was decoded last
	content  content
	findings []finding
}

// read reads and decodes the files that may have changed, several at once.
func (w *Watcher) read(files []foundFile, touched func(string) bool) []reading {
	readings := make([]reading, len(files))
	work := make(chan int)
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(files)) {
		workers.Go(func() {
			for i := range work {
				readings[i] = w.readOne(&files[i], w.files[files[i].path])
			}
		})
	}
	for i := range files {
		if w.mustRead(&files[i], touched) {
			work <- i
		} else {
			readings[i].unread = true
		}
	}
	close(work)
	workers.Wait()
	return readings
}

// mustRead reports whether a file may have changed.
func (w *Watcher) mustRead(f *foundFile, touched func(string) bool) bool {
	st := w.files[f.path]
	if st == nil || f.err != nil || st.info == nil || st.trouble != "" || !st.emptySince.IsZero() {
		return true
	}
	return touched(filepath.Join(w.dir, filepath.FromSlash(f.path))) || f.target != "" && touched(f.target) ||
		!os.SameFile(f.info, st.info) || f.info.Size() != st.info.Size() || !f.info.ModTime().Equal(st.info.ModTime()) ||
		st.readAt.Sub(st.info.ModTime()) < settleTime
}

// readOne is called by several goroutines; it does not change the watcher.
func (w *Watcher) readOne(f *foundFile, st *fileState) reading {
	r := reading{readAt: time.Now(), err: f.err}
	if r.err != nil {
		return r
	}
	type file struct {
		data []byte
		info fs.FileInfo
		err  error
	}
	name := filepath.Join(w.dir, filepath.FromSlash(f.path))
	read, err := within(&w.calls, name, func() (f file) {
		f.data, f.info, f.err = readFile(name, w.maxFileSize)
		return f
	})
	data := read.data
	if r.info, r.err = read.info, read.err; err != nil {
		r.err = err
	}
	if r.err != nil {
		// Deleted since the walk: its event will cause the next look.
		r.unread = errors.Is(r.err, fs.ErrNotExist) && f.target == ""
		return r
	}
	r.empty = len(data) == 0
	r.sum = sha256.Sum256(data)
	if r.same = st != nil && st.decoded && st.sum == r.sum; !r.same {
		r.content, r.findings = decode(f.path, data, w.options)
	}
	return r
}

// take updates a file's state from a reading.
func (w *Watcher) take(now time.Time, f *foundFile, r reading) {
	if r.unread {
		return
	}
	st := w.files[f.path]
	if st == nil {
		st = &fileState{}
		w.files[f.path] = st
	}
	wasInError := st.inError()
	st.info, st.readAt = r.info, r.readAt
	if r.err != nil {
		w.unreadable(f.path, st, r.err)
		return
	}
	st.trouble = ""
	if r.empty && len(st.good.objects) > 0 {
		if st.emptySince.IsZero() {
			st.emptySince = time.Now() // not now: it may have been emptied during this look
		}
		if now.Sub(st.emptySince) < w.emptyGrace {
			return
		}
	}
	st.emptySince = time.Time{}
	if !r.same {
		st.sum, st.decoded, st.bad, st.why = r.sum, true, hasErrors(r.findings), firstError(r.findings)
		w.tell(r.findings, st.inForce())
		if !st.bad {
			st.good = r.content
			w.catalog.set(f.path, r.content.objects)
		}
	}
	if wasInError && !st.inError() {
		if _, ok := w.lines.Take(f.path, now); ok {
			w.log.Info().Msgf("%s: is in order again", f.path)
		}
	}
}

// unreadable records that a file cannot be read; its last good content stays.
func (w *Watcher) unreadable(path string, st *fileState, err error) {
	text := ioText(err)
	kind := text
	if errors.As(err, new(tooLargeError)) {
		kind = "too large" // a file that still grows is told once
	}
	if st.trouble == kind {
		return
	}
	st.trouble = kind
	found := []finding{{file: path, text: text}}
	st.why = firstError(found)
	w.tell(found, st.inForce())
}

// inForce says what is in force in place of a file's invalid content.
func (st *fileState) inForce() string {
	if len(st.good.objects) > 0 {
		return "last good content"
	}
	return "nothing"
}

// tell logs findings about files, and what is in force instead, up to a bound for
// each file.
func (w *Watcher) tell(findings []finding, instead string) {
	now := time.Now()
	for _, f := range findings {
		last, ok := w.lines.Take(f.file, now)
		if !ok {
			continue
		}
		if f.warning {
			w.log.Warn().Msg(f.String())
		} else {
			w.log.Error().Str("in_force", instead).Msg(f.String())
		}
		if last {
			w.log.Warn().Msgf("%s: had %d lines in a minute: further ones are left out", f.file, once.PerMinute)
		}
	}
}

// publish brings Stats up to date.
func (w *Watcher) publish(lastChange time.Time) {
	s := &Stats{
		Files:      len(w.files),
		Objects:    make(map[string]int, len(kinds)),
		PassedOver: make(map[string]int),
		LastChange: lastChange,
		Polling:    w.watches.failed != nil,
	}
	for _, st := range w.files {
		if st.inError() {
			s.FilesInError++
			s.Errors = append(s.Errors, st.why)
		}
		for k, n := range st.good.passedOver {
			s.PassedOver[k] += n
		}
	}
	slices.Sort(s.Errors)
	s.Errors = s.Errors[:min(len(s.Errors), maxErrors)]
	for k, n := range w.catalog.count {
		s.Objects[string(k)] = n
	}
	w.stats.Store(s)
}
