package main

import "testing"

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
		o := runOptions{maxPipes: 128}
		l, err := o.shareOut(c.files)
		if err != nil {
			t.Fatal(err)
		}
		if l.sessions != c.sessions || l.serviceSessions != c.sessions || l.connections != c.connections {
			t.Errorf("%d files: %d sessions, %d connections; want %d, %d", c.files, l.sessions, l.connections, c.sessions, c.connections)
		}
		if most := c.connections - c.connections/32; l.serviceConnections != most || l.namespaceConnections != most || l.serviceDialing != min(c.connections/8, 1024) {
			t.Errorf("%d files: %d connections of a Service, %d of a namespace, %d that wait for an endpoint", c.files, l.serviceConnections, l.namespaceConnections, l.serviceDialing)
		}
		if sum := ownFiles + 2*o.maxPipes + l.listeners + sessionFiles(l.sessions) + 2*l.connections; sum > c.files {
			t.Errorf("%d files: %d are shared out", c.files, sum)
		}
	}
	for _, o := range []runOptions{
		{maxPipes: 128, maxSessions: 800},
		{maxPipes: 128, maxConnections: 400},
		{maxPipes: 500},
	} {
		if l, err := o.shareOut(1024); err == nil {
			t.Errorf("%+v of 1024 files gives %+v", o, l)
		}
	}
}
