package demo

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
)

func TestAgree(t *testing.T) {
	v := visit{service: serviceNamed(t, "web"), vip: keyNumber(1).vip, from: keyNumber(1).client, answer: "ash", sent: 59, received: 105}
	right := record{Connection: api.Connection{Service: "shop/web:http", Pod: "shop/ash", BytesFromClient: 59, BytesFromEndpoint: 105, End: "client_fin"}}
	check.OK(t, agree(&v, &right))
	for field, spoil := range map[string]func(*record){
		"service":             func(r *record) { r.Service = "shop/cart:http" },
		"pod":                 func(r *record) { r.Pod = "shop/birch" },
		"bytes_from_client":   func(r *record) { r.BytesFromClient-- },
		"bytes_from_endpoint": func(r *record) { r.BytesFromEndpoint = 0 },
		"end":                 func(r *record) { r.End = "endpoint_reset" },
	} {
		wrong := right
		spoil(&wrong)
		check.Errorf(t, agree(&v, &wrong), field, "wrong %s", field)
	}
}

func TestCounts(t *testing.T) {
	visits := []*visit{{answer: "elm"}, {answer: "ash"}, {answer: "elm"}, {answer: "birch", err: errors.New("cut")}}
	check.Equal(t, counts(visits), "ash 1, elm 2")
	check.Equal(t, counts(nil), "no answer")
}

// endedShow is a show whose proxy has ended and left this log.
func endedShow(log string) (*show, *bytes.Buffer) {
	var out bytes.Buffer
	p := &proxy{journal: newJournal(), said: newTranscript(), exited: make(chan struct{})}
	feed(p.journal.line, log)
	p.journal.end()
	p.said.add("the proxy's own words")
	close(p.exited)
	return &show{options: Options{Once: true}, out: &printer{out: &out, width: defaultWidth}, manifests: &manifestDir{},
		proxy: p, ledger: &ledger{}, services: shopServices(), world: &world{ipv6: true}}, &out
}

func TestEnd(t *testing.T) {
	one, two := keyNumber(1), keyNumber(2)
	for _, c := range []struct {
		name, log string
		held      bool
		wrong     string
	}{
		{"all well", lineOf(one, false) + lineOf(two, true), true, ""},
		{"a step did not hold", lineOf(one, false) + lineOf(two, true), false, "own words"},
		{"a record is missing", lineOf(two, true), true, "0 records of the connection 10.244.0.11:40001"},
		{"a record is there twice", lineOf(one, false) + lineOf(two, true) + lineOf(two, true), true, "2 records of the connection 10.244.0.11:40002"},
	} {
		s, out := endedShow(c.log)
		for _, k := range []key{one, two} {
			s.ledger.add(&visit{from: k.client, vip: k.vip, answer: "ash"})
		}
		s.ledger.refused = 2
		err := s.end(c.held)
		if ok := c.wrong == ""; ok != (err == nil) || !ok && !errors.Is(err, ErrFailed) {
			t.Errorf("%s: %v", c.name, err)
		}
		check.Contains(t, out.String(), c.wrong)
		if !strings.HasSuffix(out.String(), "\ndemo: 2 connections, 2 answered, 1 retried, 0 failed\n") {
			t.Errorf("%s: the last line of:\n%s", c.name, out)
		}
	}
}

func TestCompare(t *testing.T) {
	s, out := endedShow(lineOf(keyNumber(1), false))
	answered := &visit{service: s.services[0], from: keyNumber(1).client, vip: keyNumber(1).vip, answer: "ash"}
	refused := &visit{client: theNode, service: s.services[0], vip: keyNumber(2).vip, err: errRefused}
	lost := &visit{service: s.services[0], from: keyNumber(3).client, vip: keyNumber(3).vip, answer: "ash"}
	var o outcome
	check.Equalf(t, len(s.compare(t.Context(), &o, []*visit{answered, refused})), 1, "records")
	s.compare(t.Context(), &o, []*visit{lost})
	o.sawf("this")
	o.sawf("that")
	if s.report(&o) {
		t.Error("the step held")
	}
	for _, want := range []string{
		"✗ this; that",
		"the node to 10.96.0.10:80: connection refused",
		"service is , the client saw shop/web:http",
		"no record of the connection 10.244.0.11:40003 to 10.96.0.10:80: the log has ended",
	} {
		check.Contains(t, out.String(), want)
	}
}

func TestUntil(t *testing.T) {
	never := func() (bool, error) { return false, nil }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check.ErrorIsf(t, until(ctx, time.Hour, never), context.Canceled, "given up")
	check.Errorf(t, until(t.Context(), time.Millisecond, never), "not within 1ms", "too late")
	tries := 0
	if err := until(t.Context(), time.Hour, func() (bool, error) { tries++; return tries == 3, nil }); err != nil || tries != 3 {
		t.Errorf("%d tries, %v", tries, err)
	}
	check.ErrorIsf(t, until(t.Context(), time.Hour, func() (bool, error) { return false, errRefused }), errRefused, "an error")
}

func TestHost(t *testing.T) {
	for _, c := range []struct {
		prefix string
		n      int
		want   string
	}{{"10.244.1.0/24", 15, "10.244.1.15"}, {"10.96.0.0/16", 40, "10.96.0.40"}, {"fd00:10:96::/112", 40, "fd00:10:96::40"}, {"fd00:10:244:1::/64", 1, "fd00:10:244:1::1"}} {
		check.Equalf(t, host(netip.MustParsePrefix(c.prefix), c.n), netip.MustParseAddr(c.want), "host(%s, %d)", c.prefix, c.n)
	}
}
