package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func lineOf(k key, retried bool) string {
	failed := ""
	if retried {
		failed = `"failed_attempts":[{"error":"refused"}],`
	}
	return fmt.Sprintf(`{"client":%q,"vip":%q,%s"end":"client_fin"}`+"\n", k.client, k.vip, failed)
}

func keyNumber(i int) key {
	return key{netip.AddrPortFrom(client(0, v4), uint16(40000+i)), netip.MustParseAddrPort("10.96.0.10:80")}
}

// feed writes a text as a process does, in pieces that are no lines.
func feed(line func(string), text string) {
	w := lineWriter{line: line}
	for piece := range slices.Chunk([]byte(text), 7) {
		_, _ = w.Write(piece) // it has no error
	}
	w.end()
}

func TestJournal(t *testing.T) {
	one, two, three := keyNumber(1), keyNumber(2), keyNumber(3)
	for _, c := range []struct {
		name, log string
		keys      []key
		wrong     string // what the audit says, "" for nothing
	}{
		{"each once", lineOf(one, false) + lineOf(two, true), []key{one, two}, ""},
		{"nothing", "", nil, ""},
		{"one missing", lineOf(one, false), []key{one, two}, "0 records of the connection 10.244.0.11:40002"},
		{"one twice", lineOf(one, false) + lineOf(one, false), []key{one}, "2 records of the connection 10.244.0.11:40001"},
		{"a stranger", lineOf(one, false) + lineOf(three, false), []key{one}, "nobody made: 10.244.0.11:40003"},
		{"not JSON", lineOf(one, false) + "hello\n", []key{one}, `line "hello"`},
	} {
		j := newJournal()
		feed(j.line, c.log)
		j.end()
		err := j.audit(c.keys)
		if c.wrong == "" && err != nil || c.wrong != "" && (err == nil || !strings.Contains(err.Error(), c.wrong)) {
			t.Errorf("%s: audit says %v, want %q", c.name, err, c.wrong)
		}
		found, err := j.recordsOf(t.Context(), c.keys, time.Hour)
		if ok := c.name != "one missing" && c.name != "one twice"; ok != (err == nil) {
			t.Errorf("%s: records of the connections: %v", c.name, err)
		} else if ok {
			for i, r := range found {
				check.Equalf(t, r.key, c.keys[i], "%s: record %d", c.name, i)
			}
		}
	}
}

func TestJournalWaits(t *testing.T) {
	j := newJournal()
	got := make(chan error, 1)
	go func() {
		_, err := j.recordsOf(context.Background(), []key{keyNumber(1)}, time.Hour)
		got <- err
	}()
	j.add(parseRecord([]byte(lineOf(keyNumber(2), false))))
	j.add(parseRecord([]byte(lineOf(keyNumber(1), true))))
	check.OK(t, <-got)
	if !j.retried(keyNumber(1)) || j.retried(keyNumber(2)) || j.retried(keyNumber(3)) {
		t.Error("retried: want the first connection alone")
	}

	check.Errorf(t, must.Err(j.recordsOf(t.Context(), []key{keyNumber(3)}, time.Millisecond)), "no record of the connection 10.244.0.11:40003 to 10.96.0.10:80", "a record that does not come")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	check.Errorf(t, must.Err(j.recordsOf(ctx, []key{keyNumber(3)}, time.Hour)), "enough", "a wait that is given up")
}

func TestTally(t *testing.T) {
	l := &ledger{refused: 3}
	for i := range 5 {
		k := keyNumber(i)
		l.add(&visit{from: k.client, vip: k.vip, answer: "ash"})
	}
	l.visits[4].err = errors.New("reset")
	l.add(&visit{vip: keyNumber(9).vip, err: errRefused}) // refused where it should not be
	got := l.tally(func(k key) bool { return k == keyNumber(0) || k == keyNumber(4) })
	check.Equal(t, got, (tally{connections: 6, answered: 4, retried: 1, failed: 2, refused: 3}))
	check.Equalf(t, len(l.keys()), 5, "connections that the log should know")
}

func TestTranscript(t *testing.T) {
	s := newTranscript()
	var b strings.Builder
	b.WriteString("not JSON: \"message\":\"ready\"\n" + `{"level":"info","message":"almost ready"}` + "\n")
	feed(s.add, b.String())
	select {
	case <-s.ready:
		t.Fatal("ready too early")
	default:
	}
	feed(s.add, `{"level":"info","message":"ready"}`+"\n"+`{"message":"ready"}`)
	<-s.ready
	if got := s.text(); len(got) != 4 || got[3] != `{"message":"ready"}` {
		t.Errorf("kept %q", got)
	}
	feed(s.add, strings.Repeat("line\n", 10*transcriptLines))
	check.Equalf(t, len(s.text()), transcriptLines, "lines kept")
}
