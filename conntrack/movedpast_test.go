package conntrack

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// pastFormats are the hashes of what TestPastFormat describes, by pastFormat.
var pastFormats = map[int]string{1: "6391605147f0f862", 2: "5081464edd8efc34", 3: "b4e512c2c4685665"}

// Records that another process encodes have the same meaning here if the format's number is the same.
func TestPastFormat(t *testing.T) {
	b := newBlock()
	for _, r := range examples() {
		b.add(&r)
	}
	text := fmt.Appendf(nil, "%x %v %v", b.data, Ends(), DialErrors())
	for i := range uint8(8) {
		text = fmt.Append(text, service.Protocol(i), service.AddressKind(i), policy.Source(i))
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(text))[:16]; got != pastFormats[pastFormat] {
		t.Errorf("records are encoded otherwise (%s): give pastFormat the next number", got)
	}
}

// carried sends what a Past has to another one.
func carried(t *testing.T, from, to *Past) {
	t.Helper()
	must.OK(t, from.Move(func(m *MovedPast) error {
		text, err := json.Marshal(m)
		if err != nil {
			return err
		}
		if len(text) > 100<<10 {
			t.Errorf("a message has %d bytes", len(text))
		}
		var arrived MovedPast
		if err := json.Unmarshal(text, &arrived); err != nil {
			return err
		}
		to.Carry(&arrived)
		return nil
	}))
}

// What a process has kept goes to the next one whole, once, before that one's own, and on to a third.
func TestPastMoves(t *testing.T) {
	const records = 5000
	from, to, third := newPast(t, 2*LeastPast), newPast(t, 2*LeastPast), newPast(t, 2*LeastPast)
	from.rate, to.rate = tapRate{}, tapRate{}
	from.since, to.since = 7, 1<<40
	var want bytes.Buffer
	j := NewJSONEncoder(&want)
	put := func(p *Past, i int) {
		ep := &service.Endpoint{Place: service.At(fmt.Sprint(i%700), ""), Pod: service.Name{Namespace: "shop", Name: fmt.Sprint("cart-", i%900)}}
		r := examples()[i%3]
		r.ID, r.Wall, r.Endpoint = uint64(i), int64(i+1)*1e6, ep
		p.put([]Record{r})
		j.Encode(&r)
	}
	for i := range records {
		put(from, i)
	}
	from.current.lost = 3
	own := records
	r := examples()[0]
	r.ID, r.Wall = uint64(own), 1<<60
	to.put([]Record{r})
	j.Encode(&r)
	carried(t, from, to)
	carried(t, from, to) // nothing is left
	carried(t, to, third)
	for name, p := range map[string]*Past{"the next": to, "the third": third} {
		v := p.View()
		if v.Kept != records+1 || v.Lost != 3 {
			t.Errorf("%s process has %d records and %d lost", name, v.Kept, v.Lost)
		}
		if got := v.lines(t, time.Unix(0, 0), 0, all); got != want.String() {
			t.Errorf("%s process has other records", name)
		}
	}
	check.Equalf(t, to.View().Since.UnixNano(), 7, "the next process has all since")
}

// A Past stays within its room, and does not say that it has what it has forgotten.
func TestMovedPastIsBounded(t *testing.T) {
	from, to := newPast(t, 4*LeastPast), newPast(t, LeastPast)
	from.rate = tapRate{}
	for i := range 60_000 {
		r := Record{ID: uint64(i), Wall: int64(i + 1)}
		from.put([]Record{r})
	}
	to.since = 1 << 40
	carried(t, from, to)
	v := to.View()
	if to.held > LeastPast || v.Kept < 1000 || v.Kept >= from.View().Kept {
		t.Errorf("%d of %d records, in %d bytes", v.Kept, from.View().Kept, to.held)
	}
	_ = v.Visit(t.Context(), time.Unix(0, 0), 0, all, func(r *Record) error {
		if r.Wall <= v.Since.UnixNano() {
			return nil
		}
		if want := 60_000 - int(v.Since.UnixNano()); v.Kept < want {
			t.Errorf("since %d: %d records, want %d", v.Since.UnixNano(), v.Kept, want)
		}
		return errors.New("seen")
	})
}

// Records of another format are passed over.
func TestPastOfAnotherFormat(t *testing.T) {
	from, to := newPast(t, LeastPast), newPast(t, LeastPast)
	from.put(examples()[:1])
	must.OK(t, from.Move(func(m *MovedPast) error { m.Format++; to.Carry(m); return nil }))
	check.Equalf(t, to.View().Kept, 0, "records are kept")
}

// FuzzCarry reads what another process sends.
func FuzzCarry(f *testing.F) {
	table := NewTable(Options{})
	from := NewPast(table, LeastPast)
	from.put(examples())
	_ = from.Move(func(m *MovedPast) error {
		text, err := json.Marshal(m)
		f.Add(text)
		return err
	})
	f.Fuzz(func(t *testing.T, text []byte) {
		var m MovedPast
		if json.Unmarshal(text, &m) != nil {
			return
		}
		p := newPast(t, LeastPast)
		p.Carry(&m)
		p.View().lines(t, time.Unix(0, 0), 0, all)
	})
}
