// Package httpport creates the HTTP servers for health checks and metrics. It
// bounds the connections, sizes and times of their clients, so that these cannot
// take resources from the data path.
package httpport

import (
	"io"
	"log"
	"net"
	"net/http"
	"time"
)

// Server is an http.Server whose connections belong to a Group.
type Server struct {
	http.Server
	group *Group
}

// maxHeader bounds a request's line and header.
const maxHeader = 16 << 10

// New creates a server whose connections belong to a group. A request must arrive
// within 10 s, and its header within 5 s; answer bounds the time for its answer.
func New(g *Group, h http.Handler, answer time.Duration) *Server {
	return &Server{group: g, Server: http.Server{
		Handler:           withoutBody(h),
		ConnState:         g.stateChanged,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      answer,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHeader - 4<<10,          // net/http reads 4 KiB more
		ErrorLog:          log.New(io.Discard, "", 0), // these are errors of single clients
	}}
}

// Serve serves a listening socket, like http.Server.
func (s *Server) Serve(l net.Listener) error { return s.Server.Serve(groupListener{l, s.group}) }

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
