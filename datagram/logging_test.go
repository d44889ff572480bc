package datagram

import (
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
)

// A sample takes one session in a hundred of each loop. A client's sessions are all of one
// loop.
func TestSampledSessions(t *testing.T) {
	const sessions, loops = 20_000, 2
	for first := range uint64(loops) {
		written := 0
		for i := range uint64(sessions) {
			if LogSampled.Wants(&conntrack.Record{ID: 1 + first + loops*i, End: conntrack.Idle}) {
				written++
			}
		}
		if want := sessions / sampleEvery; written < want/2 || written > want*2 {
			t.Errorf("%d of %d sessions of loop %d, want about %d", written, sessions, first, want)
		}
	}
	failed := &conntrack.Record{ID: 1, End: conntrack.Idle, Failed: []conntrack.Attempt{{}}}
	if !LogSampled.Wants(failed) || !LogSampled.Wants(&conntrack.Record{ID: 1, End: conntrack.EndpointGone}) || LogOff.Wants(failed) {
		t.Error("sessions that failed are written unless all are off")
	}
}
