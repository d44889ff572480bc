package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// backendNames are the pods that serve. Their addresses are numbered from 11.
var backendNames = []string{"ash", "birch", "cedar", "dogwood", "elm"}

// deadBackend has an address like the others, but its port is closed.
const deadBackend = "dogwood"

// backendPort is the port that the pods serve on.
const backendPort = 8080

func backendAddr(i int, f service.Family) netip.Addr { return host(podsB[f], 11+i) }

// backends are the small HTTP servers that answer with their own name.
type backends struct {
	servers []*http.Server
}

// startBackends starts each backend but the dead one.
func startBackends(ctx context.Context, w *world) (*backends, error) {
	b := &backends{}
	for i, name := range backendNames {
		if name == deadBackend {
			continue
		}
		server := newBackend(name)
		b.servers = append(b.servers, server)
		for _, f := range w.families() {
			l, err := w.listen(ctx, netip.AddrPortFrom(backendAddr(i, f), backendPort))
			if err != nil {
				return nil, errors.Join(fmt.Errorf("%s: %w", name, err), b.close())
			}
			go serveBackend(server, l)
		}
	}
	return b, nil
}

func newBackend(name string) *http.Server {
	return &http.Server{
		ReadHeaderTimeout: 10 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, name+"\n")
			if r.URL.Path == streamPath {
				stream(w, r)
			}
		}),
	}
}

// serveBackend ends when the server is closed.
func serveBackend(s *http.Server, l net.Listener) { _ = s.Serve(l) }

// close ends the servers and their connections.
func (b *backends) close() error {
	var all error
	for _, s := range b.servers {
		all = errors.Join(all, s.Close())
	}
	return all
}
