package conntrack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

func open(t *testing.T, opts LogOptions) *Log {
	t.Helper()
	l, err := OpenLog(opts)
	must.OK(t, err)
	return l
}

// numbered returns records whose IDs tell them apart.
func numbered(from, to int) []Record {
	var list []Record
	for id := from; id < to; id++ {
		list = append(list, Record{ID: uint64(id), End: ClientFin})
	}
	return list
}

func ids(t *testing.T, text string) []uint64 {
	t.Helper()
	var list []uint64
	for line := range strings.Lines(text) {
		var r struct{ ID uint64 }
		check.OKf(t, json.Unmarshal([]byte(line), &r), "%q", line)
		list = append(list, r.ID)
	}
	return list
}

func read(t *testing.T, path string) string {
	t.Helper()
	text := must.Read(t, path)
	return string(text)
}

func TestLogFile(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "access.log")
	for i := range 2 { // the second time it is appended to
		l := open(t, LogOptions{Path: path})
		l.Write(numbered(i*10, i*10+10))
		must.OK(t, l.Close())
		check.Equalf(t, l.Stats(), LogStats{Written: 10}, "stats")
	}
	if got := ids(t, read(t, path)); len(got) != 20 || got[19] != 19 {
		t.Errorf("ids %v", got)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for _, bad := range []string{t.TempDir(), filepath.Join(path, "below"), filepath.Join(t.TempDir(), "none", "access.log")} {
		if _, err := OpenLog(LogOptions{Path: bad}); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("OpenLog(%s): %v", bad, err)
		}
	}
}

// Flush writes all encoded lines to the file, for programs that follow it.
func TestFlushWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	l := open(t, LogOptions{Path: path, Console: true})
	defer l.Close()
	l.Write(numbered(1, 4))
	check.Equalf(t, read(t, path), "", "before Flush")
	l.Flush()
	if text := read(t, path); strings.Count(text, "\n") != 3 {
		t.Errorf("after Flush: %q", text)
	}
	l.Write(numbered(0, 2000)) // more than the buffer
	if n := len(read(t, path)); n < writeSize {
		t.Errorf("%d bytes written of a full buffer", n)
	}
}

func TestReopen(t *testing.T) {
	dir := t.TempDir()
	path, rotated := filepath.Join(dir, "access.log"), filepath.Join(dir, "access.log.1")
	l := open(t, LogOptions{Path: path})
	l.Write(numbered(1, 3))
	must.OK(t, os.Rename(path, rotated))
	l.Write(numbered(3, 5)) // still to the old file
	must.OK(t, l.Reopen())
	l.Write(numbered(5, 7))
	l.Flush()
	if before, after := ids(t, read(t, rotated)), ids(t, read(t, path)); len(before) != 4 || len(after) != 2 || after[0] != 5 {
		t.Errorf("rotated %v, new %v", before, after)
	}

	// The directory is gone: the open file stays in use.
	moved := dir + "-moved"
	must.OK(t, os.Rename(dir, moved))
	defer os.RemoveAll(moved)
	if err := l.Reopen(); err == nil {
		t.Error("Reopen without the directory")
	}
	l.Write(numbered(7, 8))
	must.OK(t, l.Close())
	if got := ids(t, read(t, filepath.Join(moved, "access.log"))); len(got) != 3 {
		t.Errorf("ids %v", got)
	}
	must.OK(t, os.Mkdir(dir, 0o755))
	check.OKf(t, l.Reopen(), "Reopen after Close")
	check.OKf(t, open(t, LogOptions{Path: "-"}).Reopen(), "Reopen of standard output")
}

// SIGHUP may come at any moment: no line is lost, doubled or torn.
func TestReopenWhileWriting(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "access.log")
	l := open(t, LogOptions{Path: path})
	table := NewTable(Options{Sink: l, Queue: batchSize << 12})
	const total = 20000
	var wg sync.WaitGroup
	wg.Go(func() {
		s := table.Shard(0)
		for range total {
			r := &Record{End: Idle}
			s.Open(r)
			s.Close(r)
		}
		s.Flush()
	})
	for i := range 20 {
		must.OK(t, os.Rename(path, fmt.Sprintf("%s.%d", path, i)))
		must.OK(t, l.Reopen())
	}
	wg.Wait()
	closeTable(t, table)
	must.OK(t, l.Close())
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) != 21 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	seen := make(map[uint64]bool)
	for _, f := range files {
		for _, id := range ids(t, read(t, f)) {
			if seen[id] {
				t.Fatalf("record %d is written twice", id)
			}
			seen[id] = true
		}
	}
	if stats := table.Stats(); len(seen) != total || stats.Dropped != 0 {
		t.Errorf("%d of %d records, %+v", len(seen), total, stats)
	}
}

// A device that is always full (Linux has one).
func TestDiskFull(t *testing.T) {
	l := open(t, LogOptions{Path: "/dev/full", Logger: zerolog.Nop()})
	for range 3 {
		l.Write(numbered(0, 5))
		l.Flush()
	}
	check.Equalf(t, l.Stats(), LogStats{Lost: 15, Errors: 3}, "stats")
	check.OK(t, l.Close())
}

// limitedDisk takes so many bytes; then it is full.
type limitedDisk struct {
	bytes.Buffer
	room int
}

func (d *limitedDisk) Write(p []byte) (int, error) {
	n := min(len(p), d.room)
	d.room -= n
	d.Buffer.Write(p[:n])
	if n < len(p) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

// The disk fills up in the middle of a line, and is emptied later: all lines
// but the torn one are whole, the lost ones are counted, and the program's log is
// told once a minute.
func TestDiskFillsUpAndRecovers(t *testing.T) {
	var told bytes.Buffer
	disk := &limitedDisk{}
	l := open(t, LogOptions{Writer: disk, Logger: zerolog.New(&told)})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	l.now = func() time.Time { return now }
	write := func(from, to int) {
		l.Write(numbered(from, to))
		l.Flush()
	}
	disk.room = 1 << 20
	write(1, 4)
	line := disk.Len() / 3
	disk.room = line + line/2 // a line and a half
	write(4, 8)
	write(8, 10)
	check.Equalf(t, l.Stats(), LogStats{Written: 4, Lost: 5, Errors: 2}, "while it is full")
	now = now.Add(59 * time.Second)
	write(10, 12)
	if n := strings.Count(told.String(), "\n"); n != 1 {
		t.Errorf("told %d times within a minute:\n%s", n, told.String())
	}
	now = now.Add(time.Second)
	write(12, 13)
	disk.room = 1 << 20
	write(13, 15)
	write(15, 16)

	want := `{"level":"error","error":"no space left on device","lines_lost":3,"message":"access log cannot be written"}
{"level":"error","error":"no space left on device","lines_lost":5,"message":"access log cannot be written"}
{"level":"info","lines_lost":0,"message":"access log can be written again"}
`
	if told.String() != want {
		t.Errorf("told\n%s, want\n%s", told.String(), want)
	}
	check.Equalf(t, l.Stats(), LogStats{Written: 7, Lost: 8, Errors: 4}, "afterwards")
	lines := strings.Split(strings.TrimSuffix(disk.String(), "\n"), "\n")
	var whole []string
	torn := 0
	for _, l := range lines {
		if json.Valid([]byte(l)) {
			whole = append(whole, l)
		} else {
			torn++
		}
	}
	if got := ids(t, strings.Join(whole, "\n")); torn != 1 || fmt.Sprint(got) != "[1 2 3 4 13 14 15]" {
		t.Errorf("%d torn, ids %v", torn, got)
	}
}

// A file that ends with half a line, because the disk was full, is opened again: at the
// next start, or by SIGHUP without a rotation. The lines that follow are whole.
func TestHalfALineIsEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	must.OK(t, os.WriteFile(path, []byte(`{"half`), 0o600))
	l := open(t, LogOptions{Path: path})
	l.Write(numbered(1, 3))
	l.Flush()
	text := read(t, path)
	must.OK(t, os.Truncate(path, int64(len(text)-2)))
	for range 2 { // the second time, the line is ended already
		must.OK(t, l.Reopen())
	}
	l.Write(numbered(3, 4))
	must.OK(t, l.Reopen())
	l.Write(numbered(4, 5))
	must.OK(t, l.Close())
	lines := strings.SplitAfter(read(t, path), "\n")
	if len(lines) != 6 || lines[0] != "{\"half\n" || lines[5] != "" {
		t.Fatalf("lines %q", lines)
	}
	if got := fmt.Sprint(ids(t, lines[1]+lines[3]+lines[4])); got != "[1 3 4]" {
		t.Errorf("ids %s", got)
	}
}

// A disk that fails now and then does not fill the program's log either.
func TestErrorsThatComeAndGo(t *testing.T) {
	var told bytes.Buffer
	disk := &limitedDisk{}
	l := open(t, LogOptions{Writer: disk, Logger: zerolog.New(&told)})
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	l.now = func() time.Time { return now }
	for i := range 100 {
		disk.room = i % 2 << 20
		l.Write(numbered(i, i+1))
		l.Flush()
		now = now.Add(time.Second)
	}
	if n := strings.Count(told.String(), "\n"); n > 4 {
		t.Errorf("told %d times in 100 seconds:\n%s", n, told.String())
	}
}

// A reader that stops reading costs records, never the loops' time, and the
// program's end is not held up longer than its patience.
func TestStuckWriter(t *testing.T) {
	reader, writer, err := os.Pipe()
	must.OK(t, err)
	defer reader.Close()
	// Smaller than one batch, so that the first write hangs.
	raw, err := writer.SyscallConn()
	must.OK(t, err)
	must.OK(t, raw.Control(func(fd uintptr) { _, err = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 4096) }))
	must.OK(t, err)
	var told bytes.Buffer
	l := open(t, LogOptions{Writer: writer, Logger: zerolog.New(&told)})
	table := NewTable(Options{Sink: l, Queue: 2 * batchSize})
	s := table.Shard(0)
	const total = 50 * batchSize // far more than a pipe and the queue hold
	for range total {
		r := &Record{End: Idle}
		s.Open(r)
		s.Close(r)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := table.Close(ctx); err == nil {
		t.Error("the table is closed with nobody reading")
	}
	wait.True(t, "the first write hangs", func() bool {
		fds := []unix.PollFd{{Events: unix.POLLOUT}}
		must.OK(t, raw.Control(func(fd uintptr) { fds[0].Fd = int32(fd) }))
		n, err := unix.Poll(fds, 0)
		return n == 0 && err == nil
	})
	if err := l.Close(); !errors.Is(err, errHangs) {
		t.Errorf("Close with nobody reading: %v", err)
	}
	if stats := table.Stats(); stats.Dropped == 0 || stats.Queued+stats.Dropped != total {
		t.Errorf("stats %+v", stats)
	}
	// The reader goes away: the writes that hang fail, and all ends.
	reader.Close()
	closeTable(t, table)
	if got := l.Stats(); got.Lost == 0 || got.Written+got.Lost != table.Stats().Queued {
		t.Errorf("log %+v, table %+v", got, table.Stats())
	}
	check.OK(t, l.Close())
	lost := uint64(0)
	for line := range strings.Lines(told.String()) {
		var said struct {
			RecordsLost uint64 `json:"records_lost"`
		}
		must.OK(t, json.Unmarshal([]byte(line), &said))
		lost += said.RecordsLost
	}
	if lost != table.Stats().Dropped {
		t.Errorf("told of %d of %d lost records:\n%s", lost, table.Stats().Dropped, told.String())
	}
}

func TestWriteAfterClose(t *testing.T) {
	l := open(t, LogOptions{Path: filepath.Join(t.TempDir(), "access.log")})
	must.OK(t, l.Close())
	l.Write(numbered(0, 3))
	l.Flush()
	check.Equalf(t, l.Stats(), LogStats{Lost: 3, Errors: 1}, "stats")
	check.OK(t, l.Close())
}

// In a take-over, two processes append to one file. What one has half written when the other
// opens it gets its end: no line is empty.
func TestLogBesideAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	other, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must.OK(t, err)
	defer other.Close()
	write := func(text string) {
		t.Helper()
		must.OK(t, must.Err(other.WriteString(text)))
	}
	write(`{"id":`)
	l := open(t, LogOptions{Path: path, Beside: true})
	write("1}\n")
	l.Write(numbered(2, 4))
	must.OK(t, l.Close())
	if got := ids(t, read(t, path)); fmt.Sprint(got) != "[1 2 3]" {
		t.Errorf("ids %v", got)
	}
}
