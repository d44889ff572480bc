package conntrack

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestLogRate writes no more lines in a second than allowed, but ten times as many of
// connections with a failed attempt, and counts the others.
func TestLogRate(t *testing.T) {
	var out, said bytes.Buffer
	l, err := OpenLog(LogOptions{Writer: &out, Logger: zerolog.New(&said), Rate: 2})
	must.OK(t, err)
	now := time.Now()
	l.now = func() time.Time { return now }
	port := &service.Port{}
	fine := Record{Port: port, Connected: true}
	failed := Record{Port: port, Connected: true, Failed: []Attempt{{}}}
	lines := func(r Record, n int) int {
		out.Reset()
		for range n {
			l.Write([]Record{r})
		}
		l.Flush()
		return strings.Count(out.String(), "\n")
	}
	for _, step := range []struct {
		record  Record
		n, want int
		after   time.Duration
	}{
		{fine, 10, 2, 0},
		{failed, 100, 20, 0},
		{fine, 10, 0, time.Second - 1},
		{fine, 10, 2, 1},
		{failed, 10, 10, 0},
	} {
		now = now.Add(step.after)
		if got := lines(step.record, step.n); got != step.want {
			t.Errorf("%d of %d records, want %d", got, step.n, step.want)
		}
	}
	if got := l.Stats().LeftOut; got != 8+80+10+8 {
		t.Errorf("%d are counted as left out", got)
	}
	if got := strings.Count(said.String(), "--access-log-rate"); got != 1 {
		t.Errorf("the log says it %d times in a minute", got)
	}
}

// TestLogSaysHowManyAreLeftOut also where no further one is left out, and at the end.
func TestLogSaysHowManyAreLeftOut(t *testing.T) {
	var said bytes.Buffer
	l, err := OpenLog(LogOptions{Writer: io.Discard, Logger: zerolog.New(&said), Rate: 2})
	must.OK(t, err)
	now := time.Now()
	l.now = func() time.Time { return now }
	fine := Record{Port: &service.Port{}, Connected: true}
	for _, step := range []struct {
		n     int
		after time.Duration
		want  string
	}{
		{10, 0, `"records":1,`}, // the first at once
		{1, reportEvery - 1, ""},
		{1, 1, `"records":7,`},
		{10, time.Second, ""},
		{0, 0, `"records":8,`}, // the end
	} {
		said.Reset()
		now = now.Add(step.after)
		for range step.n {
			l.Write([]Record{fine})
		}
		if step.n == 0 {
			must.OK(t, l.Close())
		}
		if got := said.String(); strings.Count(got, "records are left out") != strings.Count(step.want, "records") || !strings.Contains(got, step.want) {
			t.Errorf("after %d records the log says %q, want %s", step.n, got, step.want)
		}
	}
}

// TestLogOfAService: the annotation of a Service leaves out its records.
func TestLogOfAService(t *testing.T) {
	for value, want := range map[string]int{"": 3, "all": 3, "failed": 2, "off": 0, "other": 3} {
		var out bytes.Buffer
		l, err := OpenLog(LogOptions{Writer: &out})
		must.OK(t, err)
		port := &service.Port{}
		if value != "" {
			port.Annotations = map[string]string{"access-log": value}
		}
		l.Write([]Record{{Port: port, Connected: true}, {Port: port, Connected: true, Failed: []Attempt{{}}}, {Port: port}})
		l.Flush()
		if got := strings.Count(out.String(), "\n"); got != want {
			t.Errorf("%q: %d records, want %d", value, got, want)
		}
		if err := CheckAnnotation("access-log", value); (err == nil) != (value == "all" || value == "failed" || value == "off") {
			t.Errorf("%q: %v", value, err)
		}
	}
}
