package sctp

import (
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Associations wait at a limit for a place, or are aborted when their time is over; they are held
// while a Service has no endpoint, and aborted some time after theirs has gone.
func TestProxyKeepsAnnotations(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	there := []string{b.IPv4.String()}
	queue := svc{name: "queue", ip: "10.96.0.10", meta: "{sluice.dev/max-connections: '1', sluice.dev/queue-timeout: 10m}", endpoints: there}
	full := svc{name: "full", ip: "10.96.0.11", meta: "{sluice.dev/max-connections-per-endpoint: '1', sluice.dev/queue-timeout: 100ms}", endpoints: there}
	held := svc{name: "held", ip: "10.96.0.12", meta: "{sluice.dev/hold: 10m}"}
	gone := svc{name: "gone", ip: "10.96.0.13", meta: "{sluice.dev/drain: 1s}", endpoints: there}
	p := startProxy(t, lab.Node.Namespace, manifest(queue, full, held, gone))
	begin := func(s svc, text string) *peer {
		t.Helper()
		a, err := dial(lab.Client.Namespace, s.ip+":3868", options())
		if err == nil {
			t.Cleanup(a.abort)
			err = a.send(note{text: []byte(text)})
		}
		must.OKf(t, err, "%s", s.name)
		return a
	}
	answered := func(a *peer, text string) {
		t.Helper()
		if got, err := a.receive(); err != nil || string(got.text) != text {
			t.Fatalf("%s: %q, %v", text, got.text, err)
		}
	}
	aborted := func(a *peer, err error, end string) {
		t.Helper()
		if err == nil {
			_, err = a.receive()
		}
		check.ErrorIsf(t, err, sys.ECONNRESET, "%s", end)
		check.Equalf(t, p.ended(1)[0].End, end, "the end is")
	}

	first := begin(queue, "the first one")
	answered(first, "the first one")
	second := begin(queue, "the second one waits")
	p.await("a connection that waits at the limit", "allows: further ones wait up to 10m0s")
	if e := first.shutDown(); e != nil {
		t.Fatal(e)
	}
	answered(second, "the second one waits")
	p.ended(1)

	answered(begin(full, "the endpoint has one"), "the endpoint has one")
	tooMany, err := dial(lab.Client.Namespace, full.ip+":3868", options())
	aborted(tooMany, err, "limit")

	waits := begin(held, "held")
	p.await("a connection that is held", "connections wait for endpoints, up to 10m0s")
	held.endpoints = there
	p.write(manifest(queue, full, held, gone))
	answered(waits, "held")

	drained := begin(gone, "drained")
	answered(drained, "drained")
	gone.endpoints = nil
	p.write(manifest(queue, full, held, gone))
	aborted(drained, nil, "drained")
}
