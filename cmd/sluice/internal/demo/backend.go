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
)

// backendNames are the pods that serve. Their addresses are numbered from 11.
var backendNames = []string{"ash", "birch", "cedar", "dogwood", "elm"}

// deadBackend has an address like the others, but its port is closed.
const deadBackend = "dogwood"

// backendPort is the port that the pods serve on.
const backendPort = 8080

func backendAddrs(i int) (v4, v6 netip.Addr) {
	return host(podsB4, 11+i), host(podsB6, 11+i)
}

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
		v4, v6 := backendAddrs(i)
		addrs := []netip.Addr{v4}
		if w.ipv6 {
			addrs = append(addrs, v6)
		}
		server := newBackend(name)
		b.servers = append(b.servers, server)
		for _, a := range addrs {
			l, err := w.listen(ctx, netip.AddrPortFrom(a, backendPort))
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
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, name+"\n")
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
