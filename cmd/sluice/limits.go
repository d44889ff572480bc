package main

import (
	"fmt"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// limits are the bounds that follow from the limit of open files.
type limits struct {
	connections          int // in all; two descriptors each
	serviceConnections   int // of one Service
	namespaceConnections int // of one namespace
	serviceDialing       int // of one Service, that wait for an endpoint
	listeners            int // listening sockets of service ports
	claims               int // listening sockets that are bound to addresses of Services and nodes
	descriptors          int // that connections and claims share
	sessions             int // of UDP, in all; a descriptor each, and what sessionFiles says
	serviceSessions      int // of one Service
}

const (
	// ownFiles are the descriptors that the process needs beside connections,
	// listeners and pipes: event loops, netlink, inotify, logs, manifests that are
	// read, and clients of the ports for health checks and metrics.
	ownFiles = 128 + 2*httpport.MaxConnections + metricsConnections
	// metricsConnections bounds the clients of metrics: an answer may take
	// megabytes until it is read.
	metricsConnections = 8
	// mostListeners bounds the default of --max-listeners.
	mostListeners = 8192
	// mostSessions bounds the default of --max-udp-sessions: one takes about 4 KiB
	// of memory, three of them the kernel's.
	mostSessions = 65536
	// mostDialing bounds the default of --max-dialing-per-service.
	mostDialing = 1024
	// leastConnections is how many connections must be possible at least.
	leastConnections = 16
)

// sessionFiles returns the descriptors that UDP needs for so many sessions: a
// quarter more, for pooled sockets, listening sockets, and sockets for replies.
func sessionFiles(sessions int) int { return sessions + sessions/4 }

// limits divides the descriptors of this process, so that connections can never take
// those that the proxy itself needs, and one service can never take all.
func (o *runOptions) limits() (limits, error) {
	files, err := sys.RaiseFileLimit()
	if err != nil {
		return limits{}, err
	}
	return o.shareOut(int(min(files, 1<<30)))
}

// shareOut is limits for a given number of descriptors.
func (o *runOptions) shareOut(files int) (limits, error) {
	l := limits{
		connections:          o.maxConnections,
		serviceConnections:   o.maxServiceConnections,
		namespaceConnections: o.maxNamespaceConnections,
		serviceDialing:       o.maxServiceDialing,
		listeners:            o.maxListeners,
		claims:               o.maxClaims,
		sessions:             o.maxSessions,
		serviceSessions:      o.maxServiceSessions,
	}
	if l.sessions == 0 {
		// Few, as most descriptors are for TCP connections, and an answered session
		// can make room for another without harm. With the million files of a
		// container it is as many as connection tracking has for each processor,
		// enough for a thousand new clients in each of the 30 s of a session's timeout.
		l.sessions = min(max(files/32, 16), mostSessions)
	}
	if l.serviceSessions == 0 {
		l.serviceSessions = l.sessions
	}
	if l.listeners == 0 {
		l.listeners = min(max(files/32, 2), mostListeners)
	}
	l.descriptors = files - ownFiles - 2*o.maxPipes - l.listeners - sessionFiles(l.sessions)
	possible := l.descriptors / 2
	if possible < leastConnections {
		return limits{}, fmt.Errorf("this process may open %d files, which leaves room for %d connections: raise the limit of open files (ulimit -n), or lower --max-pipes, --max-listeners and --max-udp-sessions", files, max(possible, 0))
	}
	if l.claims == 0 {
		l.claims = l.descriptors / 2
	}
	if l.connections == 0 {
		l.connections = possible
	}
	if l.connections > possible {
		return limits{}, fmt.Errorf("--max-connections %d: this process may open %d files, enough for %d; raise the limit of open files (ulimit -n)", l.connections, files, possible)
	}
	if l.serviceConnections == 0 {
		l.serviceConnections = l.connections - l.connections/32
	}
	if l.namespaceConnections == 0 {
		l.namespaceConnections = max(l.connections-l.connections/32, l.serviceConnections)
	}
	if l.serviceDialing == 0 {
		// Clients of a Service with dead endpoints wait for seconds; they must
		// not take the descriptors of others.
		l.serviceDialing = min(max(l.connections/8, 1), mostDialing)
	}
	return l, nil
}
