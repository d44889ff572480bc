// Package httpport creates the HTTP servers for health checks and metrics. It
// bounds the connections, sizes and times of their clients, so that these cannot
// take resources from the data path.
package httpport

import (
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// Server is an http.Server whose connections belong to a Group.
type Server struct {
	http.Server
	group *Group
	grace time.Duration // Grace but in tests

	mu        sync.Mutex
	listeners map[net.Listener]struct{} // guarded by mu
	ending    bool                      // guarded by mu: End has been called
	accepting sync.WaitGroup            // calls of Serve
	serving   sync.WaitGroup            // connections whose goroutine has not ended
}

// maxHeader bounds a request's line and header.
const maxHeader = 16 << 10

// New creates a server whose connections belong to a group. A request must arrive
// within 10 s, and its header within 5 s; answer bounds the time for its answer.
func New(g *Group, h http.Handler, answer time.Duration) *Server {
	s := &Server{group: g, grace: Grace, Server: http.Server{
		Handler:           withoutBody(h),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      answer,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHeader - 4<<10,          // net/http reads 4 KiB more
		ErrorLog:          log.New(io.Discard, "", 0), // these are errors of single clients
	}}
	s.ConnState = s.stateChanged
	return s
}

// stateChanged implements http.Server.ConnState.
func (s *Server) stateChanged(c net.Conn, state http.ConnState) {
	s.group.stateChanged(c, state)
	switch state {
	case http.StateNew: // before Serve returns
		s.serving.Add(1)
	case http.StateClosed, http.StateHijacked:
		s.serving.Done()
	}
}

// Serve serves a listening socket, like http.Server, also in that it returns
// http.ErrServerClosed after End.
func (s *Server) Serve(l net.Listener) error {
	if !s.begin(l) {
		_ = l.Close()
		return http.ErrServerClosed
	}
	err := s.Server.Serve(groupListener{l, s.group})
	if s.finish(l) {
		return http.ErrServerClosed
	}
	return err
}

// maxBody bounds a request's body. No request needs one.
const maxBody = 4 << 10

// withoutBody closes the connection of a request with a larger body, which
// http.Server would otherwise read or wait for.
func withoutBody(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength < 0 || r.ContentLength > maxBody {
			if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
				_ = c.Close() // the client gets no answer
				return
			}
		}
		h.ServeHTTP(w, r)
	})
}
