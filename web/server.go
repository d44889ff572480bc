package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/sluice-proxy/sluice/internal/httpport"
)

const (
	// maxConnections bounds the connections of browsers, each of which uses up to six.
	// A new one takes the place of an idle one, or of one that has been served longest.
	maxConnections = 48
	// answerTime bounds an answer that is no stream.
	answerTime = time.Minute
)

// Server serves the page at an address.
type Server struct {
	address     string
	listener    net.Listener // nil if the address could not be taken
	server      *httpport.Server
	connections httpport.Group
}

// Listen listens at an address and port. The server answers while Serve runs. If only
// the address cannot be taken, there is a Server beside the error, for Keep.
func Listen(address string, o Options) (*Server, error) {
	s, err := On(nil, o)
	if err != nil {
		return nil, err
	}
	s.address = address
	s.listener, err = s.listen()
	return s, err
}

// On returns a server on a socket that listens already.
func On(l net.Listener, o Options) (*Server, error) {
	h, err := New(o)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l}
	s.connections.Max = maxConnections
	s.server = httpport.New(&s.connections, h, answerTime)
	return s, nil
}

func (s *Server) listen() (net.Listener, error) {
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		return nil, fmt.Errorf("the page: %w", err)
	}
	return l, nil
}

// URL returns what a browser on this machine is to open.
func (s *Server) URL() string {
	address := s.listener.Addr().String()
	if tcp, ok := s.listener.Addr().(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
		address = fmt.Sprintf("localhost:%d", tcp.Port)
	}
	return "http://" + address + "/"
}

// Evicted returns how many connections were closed in favour of new ones; 0 for nil.
func (s *Server) Evicted() uint64 {
	if s == nil {
		return 0
	}
	return s.connections.Evicted()
}

// Serve serves browsers until ctx ends. It returns an error if the socket fails.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.Close)
	err := s.server.Serve(s.listener)
	if stop() && !errors.Is(err, http.ErrServerClosed) { // ctx has not ended, so the server failed
		s.Close()
		return fmt.Errorf("the page at %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// Keep serves browsers until ctx ends, and listens again, after each pause, if the
// socket fails. told gets each error, and nil when browsers are answered.
func (s *Server) Keep(ctx context.Context, pause time.Duration, told func(error)) {
	s.server.Keep(ctx, s.listener, s.listen, pause, told)
}

// Close ends all answers.
func (s *Server) Close() {
	_ = s.server.Close()
	if s.listener != nil {
		_ = s.listener.Close() // if it was never served
	}
}
