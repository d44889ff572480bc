package node

import (
	"testing"

	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/test/must"
)

// What connections, sessions and listeners can take together is never more than
// there is, and TCP keeps most of it.
func TestDescriptorsAreSharedOut(t *testing.T) {
	for _, c := range []struct {
		files, sessions, connections int
	}{
		{1024, 32, 248},
		{20000, 625, 9069},
		{65536, 2048, 30236},
		{1 << 20, 32768, 499484},
		{1 << 30, 65536, 536825628},
	} {
		o := Config{Relay: relay.Config{MaxPipes: 128}}
		l := must.Get(o.shareOut(c.files))(t)
		if l.datagram.MaxSessions != c.sessions || l.datagram.MaxServiceSessions != c.sessions || l.stream.MaxConnections != c.connections {
			t.Errorf("%d files: %d sessions, %d connections; want %d, %d", c.files, l.datagram.MaxSessions, l.stream.MaxConnections, c.sessions, c.connections)
		}
		if most := c.connections - c.connections/32; l.stream.MaxServiceConnections != most-most/32 || l.stream.MaxNamespaceConnections != most || l.stream.MaxServiceDialing != min(c.connections/8, 1024) {
			t.Errorf("%d files: %d connections of a Service, %d of a namespace, %d that wait for an endpoint", c.files, l.stream.MaxServiceConnections, l.stream.MaxNamespaceConnections, l.stream.MaxServiceDialing)
		}
		if sum := ownFiles + 2*o.Relay.MaxPipes + l.listeners + sessionFiles(l.datagram.MaxSessions) + 2*l.stream.MaxConnections; sum > c.files {
			t.Errorf("%d files: %d are shared out", c.files, sum)
		}
	}
	// A Service leaves something for others of its namespace, whichever limit is given.
	for _, o := range []Config{
		{Stream: stream.Config{MaxConnections: 64}},
		{Stream: stream.Config{MaxNamespaceConnections: 32}},
		{Stream: stream.Config{MaxServiceConnections: 200}},
	} {
		if l, err := o.shareOut(1024); err != nil || l.stream.MaxServiceConnections >= l.stream.MaxNamespaceConnections {
			t.Errorf("%+v: %d connections of a Service, %d of a namespace, %v", o.Stream, l.stream.MaxServiceConnections, l.stream.MaxNamespaceConnections, err)
		}
	}
	for _, o := range []Config{
		{Relay: relay.Config{MaxPipes: 128}, Datagram: datagram.Config{MaxSessions: 800}},
		{Relay: relay.Config{MaxPipes: 128}, Stream: stream.Config{MaxConnections: 400}},
		{Relay: relay.Config{MaxPipes: 500}},
	} {
		if l, err := o.shareOut(1024); err == nil {
			t.Errorf("%+v of 1024 files gives %+v", o, l)
		}
	}
}
