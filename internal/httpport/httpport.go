// Package httpport makes the HTTP servers of the proxy: health checks and
// metrics. It bounds what their clients can take from the data path: connections,
// sizes and times.
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

// New returns a server whose connections belong to a group. A request has 10 s to
// arrive, its answer has the time given.
func New(g *Group, h http.Handler, answer time.Duration) *Server {
	return &Server{group: g, Server: http.Server{
		Handler:           withoutBody(h),
		ConnState:         g.stateChanged,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      answer,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(io.Discard, "", 0), // errors of single clients
	}}
}

// Serve answers on a listener, as http.Server does.
func (s *Server) Serve(l net.Listener) error { return s.Server.Serve(groupListener{l, s.group}) }

// maxBody is how large a request's body may be. No request needs one.
const maxBody = 4 << 10

// withoutBody closes the connection of a request with a large body, which
// http.Server would read or keep waiting.
func withoutBody(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength < 0 || r.ContentLength > maxBody {
			if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
				_ = c.Close() // nothing was promised to it
				return
			}
		}
		h.ServeHTTP(w, r)
	})
}
