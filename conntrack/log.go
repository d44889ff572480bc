package conntrack

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// LogOptions configure the access log.
type LogOptions struct {
	// Path is the file to append to, or "-" for standard output.
	Path string
	// Writer replaces Path if it is not nil.
	Writer io.Writer
	// Console writes lines for people in place of JSON objects.
	Console bool
	// Keep selects the records that are written; nil selects all. The sink's goroutine
	// calls it.
	Keep func(*Record) bool
	// Logger is the program's log, which gets reports of write errors.
	Logger zerolog.Logger
	// Zone is the time zone of the console format; nil means time.Local. JSON uses
	// UTC.
	Zone *time.Location
	// Beside says that a running process appends to the file too. Its last line may be half
	// written when the log is opened, and gets its end.
	Beside bool
	// Rate bounds the lines of a second; beyond it only connections with a failed
	// attempt get one, up to ten times the rate. 0 means no bound.
	Rate int
}

const (
	// logMode lets only the owner and the group read the log, because it contains
	// client addresses. Log shippers are often in the group, such as adm.
	logMode = 0o640
	// writeSize is the size from which encoded lines are written before the queue
	// is empty.
	writeSize = 64 << 10
	// reportEvery is the minimum time between two reports of one kind.
	reportEvery = time.Minute
	// hangPatience is how long Reopen and Close wait for a blocked write.
	hangPatience = time.Second
)

// errHangs is returned by Reopen and Close if a write blocks because the reader of
// the log has stopped.
var errHangs = errors.New("access log: a write hangs")

// Log is the access log: a Sink that writes one line for each record. It continues
// after a write error: it counts the lost lines, reports to the program's log at
// most once a minute, and writes the next lines. It is safe for concurrent use.
type Log struct {
	path   string
	logger zerolog.Logger
	now    func() time.Time

	written atomic.Uint64
	lost    atomic.Uint64
	errors  atomic.Uint64
	left    atomic.Uint64

	lock   chan struct{} // a mutex with timeout; full while held; guards the fields below
	file   *os.File      // the file that OpenLog opened, or nil
	out    io.Writer
	buf    bytes.Buffer
	encode func(*Record)
	keep   func(*Record) bool // nil: all
	torn   bool               // out ends in the middle of a line
	told   bool               // an error was reported, and its end was not
	failed report             // writes
	slow   report             // records that were dropped
	rate   rate
}

var (
	_ Sink         = (*Log)(nil)
	_ LossReporter = (*Log)(nil)
)

// report limits how often one kind of trouble is reported.
type report struct {
	last   time.Time // time of the last report
	unsaid uint64    // losses since then
}

// due adds n losses. It reports whether a report is due, and of how many losses.
func (r *report) due(now time.Time, n uint64) (lost uint64, ok bool) {
	r.unsaid += n
	if !r.last.IsZero() && now.Sub(r.last) < reportEvery {
		return 0, false
	}
	lost = r.unsaid
	r.last, r.unsaid = now, 0
	return lost, true
}

// OpenLog opens the access log. It returns an error if the file cannot be opened.
// It does not wait for a reader of a named pipe.
func OpenLog(opts LogOptions) (*Log, error) {
	l := &Log{logger: opts.Logger, keep: opts.Keep, now: time.Now, out: opts.Writer, lock: make(chan struct{}, 1), rate: rate{most: opts.Rate}}
	switch {
	case opts.Writer != nil:
	case opts.Path == "-":
		l.out = os.Stdout
	default:
		f, err := openFile(opts.Path)
		if err != nil {
			return nil, err
		}
		l.path, l.file, l.out, l.torn = opts.Path, f, f, !opts.Beside && endsTorn(f)
	}
	l.buf.Grow(writeSize + writeSize/4)
	if opts.Console {
		l.encode = newConsoleEncoder(&l.buf, cmp.Or(opts.Zone, time.Local)).encode
	} else {
		l.encode = NewJSONEncoder(&l.buf).Encode
	}
	return l, nil
}

func openFile(path string) (*os.File, error) {
	f, err := sys.OpenAppend(path, logMode)
	if err != nil {
		return nil, fmt.Errorf("access log: %w", err)
	}
	return f, nil
}

// endsTorn reports whether a file ends in the middle of a line. A full disk causes that,
// and the file may be opened again, by Reopen or by the next process.
func endsTorn(f *os.File) bool {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return false
	}
	r, err := os.Open(f.Name()) // f cannot be read
	if err != nil {
		return false
	}
	defer r.Close()
	var last [1]byte
	_, err = r.ReadAt(last[:], info.Size()-1)
	return err == nil && last[0] != '\n'
}

func (l *Log) acquire() { l.lock <- struct{}{} }
func (l *Log) release() { <-l.lock }

// acquireSoon is acquire with a timeout of hangPatience.
func (l *Log) acquireSoon() error {
	select {
	case l.lock <- struct{}{}:
		return nil
	case <-time.After(hangPatience):
		return errHangs
	}
}

// Write implements Sink.
func (l *Log) Write(batch []Record) {
	l.acquire()
	defer l.release()
	for i := range batch {
		if l.keep != nil && !l.keep(&batch[i]) || !l.admit(&batch[i]) {
			continue
		}
		l.encode(&batch[i])
		if l.buf.Len() >= writeSize {
			l.flushLocked()
		}
	}
}

// Flush implements Sink: it writes the encoded lines.
func (l *Log) Flush() {
	l.acquire()
	defer l.release()
	l.flushLocked()
}

// RecordsLost implements LossReporter.
func (l *Log) RecordsLost(n uint64) {
	l.acquire()
	defer l.release()
	if lost, ok := l.slow.due(l.now(), n); ok {
		l.tellSlow(lost)
	}
}

func (l *Log) tellSlow(lost uint64) {
	l.logger.Warn().Uint64("records_lost", lost).Msg("access log is too slow; records were dropped")
}

// Reopen closes the file and opens its path again, after log rotation has renamed
// it. If that fails, it keeps the old file and returns the error. It does nothing
// unless OpenLog opened a file.
func (l *Log) Reopen() error {
	if l.path == "" {
		return nil
	}
	f, err := openFile(l.path)
	if err != nil {
		return err
	}
	if err := l.acquireSoon(); err != nil {
		return errors.Join(err, f.Close())
	}
	defer l.release()
	if l.file == nil { // closed meanwhile
		return f.Close()
	}
	l.flushLocked()
	old := l.file
	l.file, l.out, l.torn = f, f, endsTorn(f)
	if err := old.Close(); err != nil {
		return fmt.Errorf("access log: %w", err)
	}
	return nil
}

// Close writes the encoded lines and closes the file. It waits at most one second
// for a blocked write. Do not call Write afterwards.
func (l *Log) Close() error {
	if err := l.acquireSoon(); err != nil {
		return err
	}
	defer l.release()
	l.flushLocked()
	if l.slow.unsaid > 0 {
		l.tellSlow(l.slow.unsaid)
	}
	if l.failed.unsaid > 0 {
		l.logger.Error().Uint64("lines_lost", l.failed.unsaid).Msg("access log could not be written")
	}
	if l.rate.left.unsaid > 0 {
		l.tellLeft(l.rate.left.unsaid)
	}
	l.slow.unsaid, l.failed.unsaid, l.rate.left.unsaid = 0, 0, 0
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file, l.out = nil, closedWriter{}
	if err := f.Close(); err != nil {
		return fmt.Errorf("access log: %w", err)
	}
	return nil
}

// LogStats counts lines.
type LogStats struct {
	Written uint64 // lines written
	Lost    uint64 // lines lost by write errors
	Errors  uint64 // failed writes
	LeftOut uint64 // records beyond LogOptions.Rate
}

// Stats returns the counts.
func (l *Log) Stats() LogStats {
	return LogStats{Written: l.written.Load(), Lost: l.lost.Load(), Errors: l.errors.Load(), LeftOut: l.left.Load()}
}

// flushLocked writes the encoded lines. It drops lines that cannot be written,
// because keeping them would delay later ones.
func (l *Log) flushLocked() {
	if l.buf.Len() == 0 {
		return
	}
	if l.torn {
		// Best effort: if this fails the lines below fail as well.
		if _, err := l.out.Write([]byte{'\n'}); err == nil {
			l.torn = false
		}
	}
	lines := l.buf.Bytes()
	n, err := l.out.Write(lines)
	whole := uint64(bytes.Count(lines[:n], []byte{'\n'}))
	l.written.Add(whole)
	if err != nil {
		lost := uint64(bytes.Count(lines[n:], []byte{'\n'}))
		l.lost.Add(lost)
		l.errors.Add(1)
		if n > 0 {
			part := lines[bytes.LastIndexByte(lines[:n], '\n')+1 : n]
			l.torn = len(part) > 0 && !l.cutLocked(len(part))
		}
		if lost, ok := l.failed.due(l.now(), lost); ok {
			l.logger.Error().Err(err).Uint64("lines_lost", lost).Msg("access log cannot be written")
			l.told = true
		}
	} else if l.told {
		l.logger.Info().Uint64("lines_lost", l.failed.unsaid).Msg("access log can be written again")
		l.told, l.failed.unsaid = false, 0
	}
	l.buf.Reset()
}

// cutLocked takes part of a line away from the end of the file, where another process's line would be
// joined to it. It reports whether it could.
func (l *Log) cutLocked(part int) bool {
	if l.file == nil {
		return false
	}
	end, err := l.file.Seek(0, io.SeekCurrent)
	if err != nil {
		return false // a pipe
	}
	info, err := l.file.Stat()
	return err == nil && info.Mode().IsRegular() && info.Size() == end && l.file.Truncate(end-int64(part)) == nil
}

// closedWriter replaces the writer of a closed log.
type closedWriter struct{}

var errLogClosed = errors.New("access log is closed")

func (closedWriter) Write([]byte) (int, error) { return 0, errLogClosed }
