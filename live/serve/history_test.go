package serve

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The history has the connection of a service, and its columns have a number for each
// interval.
func TestHistory(t *testing.T) {
	s := newSite(t)
	var first api.History
	s.ask(t, "/v1/history", 200, &first)
	if first.Matched != 1 || len(first.Series) != 1 || first.Began.IsZero() {
		t.Fatalf("%+v", first)
	}
	r := s.open("10.2.0.1:4000")
	s.end(r)
	var got api.History
	wait.For(t, "the history has a connection", time.Minute, func() error {
		got = api.History{} // absent fields must not stay
		s.ask(t, "/v1/history?by=endpoint&service=shop/web:http&endpoint=[::ffff:10.1.0.5]:80", 200, &got)
		if len(got.Series) == 0 {
			return errors.New("no series")
		}
		return nil
	})
	n := len(got.Times)
	one := got.Series[0]
	if one.Service != "shop/web:http" || one.Protocol != "TCP" || one.Endpoint != "10.1.0.5:80" || one.Node != "n" {
		t.Errorf("%+v", one)
	}
	if n == 0 || len(got.Seconds) != n || len(got.Lost) != n || len(got.LeftOut) != n || len(one.Open) != n || len(one.Opened) != n ||
		len(one.Failed) != n || len(one.FailedAttempts) != n || len(one.BytesFromClient) != n || len(one.ConnectP99US) != n {
		t.Errorf("columns differ in length: %+v", got)
	}
	opened := 0.0
	for i, rate := range one.Opened { // the test may see it several intervals later
		opened += rate * got.Seconds[i]
		if (rate > 0) != (one.ConnectP99US[i] > 0) {
			t.Errorf("interval %d has no time to connect, or one without a connection: %+v", i, one)
		}
	}
	if opened < 0.98 || opened > 1.02 {
		t.Errorf("%f connections opened: %+v", opened, one)
	}
	var since api.History
	s.ask(t, "/v1/history?since="+fmt.Sprintf("%.3f", got.Times[n-1]), 200, &since)
	for _, at := range since.Times {
		if at <= got.Times[n-1] {
			t.Errorf("an interval at %f, asked since %f", at, got.Times[n-1])
		}
	}
}

func TestHistoryRefuses(t *testing.T) {
	s := newSite(t)
	for _, tt := range []struct{ query, want string }{
		{"by=pod", "by"}, {"service=shop/web", "by=total"}, {"since=NaN", "since"}, {"since=-1", "since"}, {"since=x", "since"},
		{"limit=1001", "limit"}, {"sort=nix", "sort"}, {"by=endpoint&endpoint=10.0.0.1", "endpoint"}, {"by=service&endpoint=10.0.0.1:80", "by=endpoint"}, {"nix=1", "nix"},
	} {
		var failed api.Error
		if s.ask(t, "/v1/history?"+tt.query, 400, &failed); !strings.Contains(failed.Error, tt.want) {
			t.Errorf("%s: %s", tt.query, failed.Error)
		}
	}
}
