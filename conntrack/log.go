package conntrack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Format is a form of the access log.
type Format uint8

// The forms.
const (
	JSON    Format = iota // one JSON object for each line
	Console               // one line for people
)

// ParseFormat returns the format of a name: "json" or "console".
func ParseFormat(name string) (Format, error) {
	switch name {
	case "json":
		return JSON, nil
	case "console":
		return Console, nil
	}
	return JSON, fmt.Errorf("access log format %q: unknown (available: json, console)", name)
}

// LogOptions say where the access log goes and what it looks like.
type LogOptions struct {
	// Path is a file that is appended to, or "-" for standard output.
	Path string
	// Writer is written to instead of Path if it is not nil.
	Writer io.Writer
	Format Format
	// Logger is the program's own log, which is told of write errors.
	Logger zerolog.Logger
	// Zone is the time zone of the console form; nil means time.Local. JSON is
	// in UTC.
	Zone *time.Location
}

const (
	// logMode lets the group read the log, such as the adm group that log
	// shippers are in, and nobody else: it holds clients' addresses.
	logMode = 0o640
	// writeSize is the size at which encoded lines are written without waiting
	// for the queue to run empty.
	writeSize = 64 << 10
	// reportEvery is the least time between two reports of one kind of trouble.
	reportEvery = time.Minute
	// hangPatience is how long Reopen and Close wait for a write that hangs.
	hangPatience = time.Second
)

// errHangs is what Reopen and Close give when nobody reads what the log writes.
var errHangs = errors.New("access log: a write hangs")

// Log is the access log: a Sink that writes one line for each record. A write
// error never stops it: the lines that could not be written are counted, the
// program's log is told at most once a minute, and the next lines are tried
// again. Its methods may be called from any goroutine.
type Log struct {
	path   string
	logger zerolog.Logger
	now    func() time.Time

	written atomic.Uint64
	lost    atomic.Uint64
	errors  atomic.Uint64

	lock   chan struct{} // full while it is held; guards what follows
	file   *os.File      // what Reopen replaces and Close closes, or nil
	out    io.Writer
	buf    bytes.Buffer
	encode func(*Record)
	torn   bool   // the last write ended within a line
	told   bool   // the program's log was told of an error and not yet of its end
	failed report // writes
	slow   report // records that were dropped
}

var (
	_ Sink         = (*Log)(nil)
	_ LossReporter = (*Log)(nil)
)

// report is a kind of trouble that the program's log is told of.
type report struct {
	last   time.Time // when it was last told
	unsaid uint64    // what was lost since then
}

// due reports whether the program's log is to be told, and of how much. n was lost
// now.
func (r *report) due(now time.Time, n uint64) (lost uint64, ok bool) {
	r.unsaid += n
	if !r.last.IsZero() && now.Sub(r.last) < reportEvery {
		return 0, false
	}
	lost = r.unsaid
	r.last, r.unsaid = now, 0
	return lost, true
}

// OpenLog opens the access log. It fails if the file cannot be opened, and waits
// for nobody to read it.
func OpenLog(opts LogOptions) (*Log, error) {
	l := &Log{logger: opts.Logger, now: time.Now, out: opts.Writer, lock: make(chan struct{}, 1)}
	switch {
	case opts.Writer != nil:
	case opts.Path == "-":
		l.out = os.Stdout
	default:
		f, err := openFile(opts.Path)
		if err != nil {
			return nil, err
		}
		l.path, l.file, l.out = opts.Path, f, f
	}
	l.buf.Grow(writeSize + writeSize/4)
	if opts.Format == Console {
		zone := opts.Zone
		if zone == nil {
			zone = time.Local
		}
		l.encode = newConsoleEncoder(&l.buf, zone).encode
	} else {
		l.encode = newJSONEncoder(&l.buf).encode
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

func (l *Log) acquire() { l.lock <- struct{}{} }
func (l *Log) release() { <-l.lock }

// acquireSoon is acquire for those who must not wait for ever.
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
		l.encode(&batch[i])
		if l.buf.Len() >= writeSize {
			l.flushLocked()
		}
	}
}

// Flush implements Sink: it writes what has been encoded.
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

// Reopen closes the file and opens it anew by its name, after a log rotation has
// renamed it. If that fails the old file stays in use. It does nothing if the log
// does not go to a file that OpenLog opened.
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
	if l.file == nil { // closed in the meantime
		return f.Close()
	}
	l.flushLocked()
	old := l.file
	l.file, l.out, l.torn = f, f, false
	if err := old.Close(); err != nil {
		return fmt.Errorf("access log: %w", err)
	}
	return nil
}

// Close writes what has been encoded and closes the file. It does not wait longer
// than a second for a write that hangs. The log must not be written to afterwards.
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
	l.slow.unsaid, l.failed.unsaid = 0, 0
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

// LogStats tells what became of the lines.
type LogStats struct {
	Written uint64 // lines that were written
	Lost    uint64 // lines that could not be written
	Errors  uint64 // writes that failed
}

// Stats tells what became of the lines.
func (l *Log) Stats() LogStats {
	return LogStats{Written: l.written.Load(), Lost: l.lost.Load(), Errors: l.errors.Load()}
}

// flushLocked writes the encoded lines. What cannot be written is lost: keeping
// it would hold up what comes later.
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
			l.torn = lines[n-1] != '\n'
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

// closedWriter stands for a log that was closed.
type closedWriter struct{}

var errLogClosed = errors.New("access log is closed")

func (closedWriter) Write([]byte) (int, error) { return 0, errLogClosed }
