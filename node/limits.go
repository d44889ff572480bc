package node

import (
	"cmp"
	"fmt"

	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/stream"
)

// limits are the data paths' configurations, with the bounds that follow from the limit
// of open files.
type limits struct {
	stream    stream.Config
	datagram  datagram.Config
	listeners int // listening sockets of service ports, of both families
	claims    int // listening sockets that are bound to addresses of Services and nodes
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
func (o *Config) limits() (limits, error) {
	files, err := sys.RaiseFileLimit()
	if err != nil {
		return limits{}, err
	}
	return o.shareOut(int(min(files, 1<<30)))
}

// shareOut is limits for a given number of descriptors.
func (o *Config) shareOut(files int) (limits, error) {
	l := limits{stream: o.Stream, datagram: o.Datagram}
	tcp, udp := &l.stream, &l.datagram
	// Few sessions, as most descriptors are for TCP connections, and an answered session
	// can make room for another without harm. With the million files of a container it is
	// as many as connection tracking has for each processor, enough for a thousand new
	// clients in each of the 30 s of a session's timeout.
	udp.CountForwarded = udp.MaxSessions+udp.MaxServiceSessions > 0
	udp.MaxSessions = cmp.Or(udp.MaxSessions, min(max(files/32, 16), mostSessions))
	udp.MaxServiceSessions = cmp.Or(udp.MaxServiceSessions, udp.MaxSessions)
	l.listeners = cmp.Or(o.MaxListeners, min(max(files/32, 2), mostListeners))
	tcp.MaxListeners, udp.MaxListeners = max(l.listeners/2, 1), max(l.listeners/2, 1)
	tcp.Descriptors = files - ownFiles - 2*o.Relay.MaxPipes - l.listeners - sessionFiles(udp.MaxSessions)
	possible := tcp.Descriptors / 2 // connections; two descriptors each
	if possible < leastConnections {
		return limits{}, fmt.Errorf("this process may open %d files, which leaves room for %d connections: raise the limit of open files (ulimit -n), or lower --max-pipes, --max-listeners and --max-udp-sessions", files, max(possible, 0))
	}
	l.claims = cmp.Or(o.MaxClaims, tcp.Descriptors/2)
	tcp.CountForwarded = tcp.MaxConnections+tcp.MaxServiceConnections+tcp.MaxNamespaceConnections > 0
	tcp.MaxConnections = cmp.Or(tcp.MaxConnections, possible)
	if tcp.MaxConnections > possible {
		return limits{}, fmt.Errorf("--max-connections %d: this process may open %d files, enough for %d; raise the limit of open files (ulimit -n)", tcp.MaxConnections, files, possible)
	}
	most := tcp.MaxConnections - tcp.MaxConnections/32
	tcp.MaxNamespaceConnections = cmp.Or(tcp.MaxNamespaceConnections, max(most, tcp.MaxServiceConnections))
	// A Service leaves something for the others of its namespace.
	tcp.MaxServiceConnections = cmp.Or(tcp.MaxServiceConnections, min(most, tcp.MaxNamespaceConnections-tcp.MaxNamespaceConnections/32))
	// Clients of a Service with dead endpoints wait for seconds; they must not take the
	// descriptors of others.
	tcp.MaxServiceDialing = cmp.Or(tcp.MaxServiceDialing, min(max(tcp.MaxConnections/8, 1), mostDialing))
	return l, nil
}
