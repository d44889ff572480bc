package dns

import (
	"errors"
	"reflect"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// TestReadRecord reads a resolver's answers, whose names are compressed, and packs them
// again: they say the same.
func TestReadRecord(t *testing.T) {
	name := dnsmessage.MustNewName("alias.example.org.")
	other := dnsmessage.MustNewName("a.very.long.name.example.org.")
	bodies := []dnsmessage.ResourceBody{
		&dnsmessage.CNAMEResource{CNAME: other}, &dnsmessage.NSResource{NS: other}, &dnsmessage.PTRResource{PTR: other},
		&dnsmessage.MXResource{Pref: 513, MX: other}, &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}},
		&dnsmessage.AAAAResource{AAAA: [16]byte{0x20, 1, 15: 9}}, &dnsmessage.TXTResource{TXT: []string{"one", "two"}},
		&dnsmessage.SRVResource{Priority: 1, Weight: 2, Port: 3, Target: other},
		&dnsmessage.SOAResource{NS: other, MBox: other, Serial: 7},
	}
	q := query{question: dnsmessage.Question{Name: name, Type: dnsmessage.TypeALL, Class: dnsmessage.ClassINET}}
	m := dnsmessage.Message{Questions: []dnsmessage.Question{q.question}}
	for _, b := range bodies {
		h := dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: 60}
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: b})
	}
	sent, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	sent = append(sent, 0xc0, 12, 0, byte(dnsmessage.TypeSRV), 0, byte(dnsmessage.ClassINET), 0, 0, 0, 60, 0, 8, 0, 1, 0, 2, 0, 3, 0xc0, 78)
	sent[7]++ // one more answer, whose target is compressed: it is that of the NS record
	var p dnsmessage.Parser
	if _, err := p.Start(sent); err != nil || p.SkipAllQuestions() != nil {
		t.Fatal(err)
	}
	var again message
	for {
		r, err := readRecord(&p)
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if r.data != nil {
			again.answers = append(again.answers, r)
		}
	}
	packed, err := again.pack(&q, 0)
	if err != nil {
		t.Fatal(err)
	}
	var got dnsmessage.Message
	if err := got.Unpack(packed); err != nil {
		t.Fatal(err)
	}
	want := append(bodies[:len(bodies)-1], &dnsmessage.SRVResource{Priority: 1, Weight: 2, Port: 3, Target: other}) // without the SOA
	if len(got.Answers) != len(want) {
		t.Fatalf("%d answers; want %d", len(got.Answers), len(want))
	}
	for i, a := range got.Answers {
		if !reflect.DeepEqual(a.Body, want[i]) || a.Header.TTL != 60 || a.Header.Name != name {
			t.Errorf("got %v of %v; want %v", a.Body.GoString(), a.Header.GoString(), want[i].GoString())
		}
	}
}
