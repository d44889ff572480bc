package dns

import (
	"encoding/binary"
	"errors"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestReadRecord reads a resolver's answers of each type whose names may be compressed, and
// of two others, and packs them again: their names are whole, and the rest is as it was.
func TestReadRecord(t *testing.T) {
	const twenty = "serial, refresh, ..."
	rows := []struct {
		kind uint16
		data string // <n> is a name
	}{
		{1, "\xc0\x00\x02\x01"}, {16, "\x03one\x03two"}, {999, "\xc0\x0c"}, // an address, text and a later type
		{2, "<n>"}, {3, "<n>"}, {4, "<n>"}, {5, "<n>"}, {6, "<n><n>" + twenty}, {7, "<n>"}, {8, "<n>"}, {9, "<n>"},
		{12, "<n>"}, {14, "<n><n>"}, {15, "\x02\x01<n>"}, {17, "<n><n>"}, {18, "\x00\x01<n>"}, {21, "\x00\x01<n>"},
		{24, "the first 18 bytes<n>signature"}, {26, "\x00\x01<n><n>"}, {30, "<n>bitmap"}, {33, "\x00\x01\x00\x02\x00\x03<n>"},
		{35, "\x00\x01\x00\x02\x01S\x03SIP\x00<n>"}, {36, "\x00\x01<n>"}, {39, "<n>"},
	}
	const compressed, whole = "\x01a\xc0\x12", "\x01a\x07example\x03org\x00" // the question's name begins at 12, example.org. at 18
	q := query{question: dnsmessage.Question{Name: dnsmessage.MustNewName("alias.example.org."), Type: dnsmessage.TypeALL, Class: dnsmessage.ClassINET}}
	sent := must.Get((&message{}).pack(&q, 0))(t)
	for _, row := range rows {
		data := strings.ReplaceAll(row.data, "<n>", compressed)
		sent = binary.BigEndian.AppendUint16(append(sent, 0xc0, 12), row.kind)
		sent = binary.BigEndian.AppendUint16(append(sent, 0, 1, 0, 0, 0, 60), uint16(len(data)))
		sent = append(sent, data...)
		sent[7]++
	}
	got := readAll(t, sent)
	packed := must.Get((&message{answers: got}).pack(&q, 0))(t)
	got = readAll(t, packed)
	must.Equalf(t, len(got), len(rows), "answers")
	for i, row := range rows {
		want := record{"alias.example.org.", dnsmessage.Type(row.kind), 60, []byte(strings.ReplaceAll(row.data, "<n>", whole))}
		if !reflect.DeepEqual(got[i], want) {
			t.Errorf("got %+v\nwant %+v", got[i], want)
		}
	}
}

func readAll(t *testing.T, m []byte) (records []record) {
	t.Helper()
	var p dnsmessage.Parser
	if _, err := p.Start(m); err != nil || p.SkipAllQuestions() != nil {
		t.Fatal(err)
	}
	for {
		r, err := readRecord(&p, m)
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return records
		}
		must.OK(t, err)
		records = append(records, r)
	}
}

// FuzzReadRecord compares the names in a resolver's CNAME and SOA records with those that
// dnsmessage reads.
func FuzzReadRecord(f *testing.F) {
	for _, data := range []string{"\x01a\xc0\x0c", "\xc0\x0c\xc0\x0cserial, refresh, ...", "\xc0\x2e", "\x3flong", "\x01a\x00\x01b\x00", "\x40"} {
		f.Add([]byte(data), false)
		f.Add([]byte(data), true)
	}
	q := query{question: dnsmessage.Question{Name: dnsmessage.MustNewName("example.org."), Type: dnsmessage.TypeALL, Class: dnsmessage.ClassINET}}
	f.Fuzz(func(t *testing.T, data []byte, soa bool) {
		kind := dnsmessage.TypeCNAME
		if soa {
			kind = dnsmessage.TypeSOA
		}
		m, err := (&message{answers: []record{{"example.org.", kind, 60, data}}}).pack(&q, 0)
		if err != nil {
			return
		}
		var p dnsmessage.Parser
		r, failed := record{}, errors.New("no record")
		if _, err := p.Start(m); err == nil && p.SkipAllQuestions() == nil {
			r, failed = readRecord(&p, m)
		}
		var want []byte
		all := p
		if _, err := all.Start(m); err != nil || all.SkipAllQuestions() != nil {
			t.Fatal(err)
		}
		switch body, err := all.Answer(); b := body.Body.(type) {
		case *dnsmessage.CNAMEResource:
			want = appendName(nil, b.CNAME.String())
		case *dnsmessage.SOAResource:
			want = appendName(appendName(nil, b.NS.String()), b.MBox.String())
		default:
			if err == nil {
				t.Fatalf("an answer of type %T", b)
			}
			return // dnsmessage also refuses names with dots in their labels
		}
		if failed != nil || !strings.HasPrefix(string(r.data), string(want)) {
			t.Errorf("%q is %q, %v; want %q", data, r.data, failed, want)
		}
	})
}
