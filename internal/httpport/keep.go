package httpport

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Grace is how long End waits for clients.
const Grace = time.Second

// Leave accepts nothing more: in a take-over, another process has the same listening sockets.
// End is to follow.
func (s *Server) Leave() {
	s.mu.Lock()
	s.ending = true
	for l := range s.listeners {
		_ = l.Close()
	}
	s.mu.Unlock()
	s.SetKeepAlivesEnabled(false)
}

// End leaves, answers what clients of accepted connections ask within Grace, and closes the rest.
//
// http.Server.Shutdown would leave a request without an answer that it reads after its call.
func (s *Server) End() {
	s.Leave()
	answered := make(chan struct{})
	go func() {
		s.accepting.Wait()
		s.serving.Wait()
		close(answered)
	}()
	grace := time.NewTimer(s.grace)
	defer grace.Stop()
	select {
	case <-answered:
	case <-grace.C:
	}
	_ = s.Close() // aborts the remaining requests
}

// begin takes note of a listening socket, and reports whether it may be served.
func (s *Server) begin(l net.Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending {
		return false
	}
	if s.listeners == nil {
		s.listeners = make(map[net.Listener]struct{})
	}
	s.listeners[l] = struct{}{}
	s.accepting.Add(1)
	return true
}

// finish undoes begin, and reports whether the server has been told to end.
func (s *Server) finish(l net.Listener) (ending bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, l)
	s.accepting.Done()
	return s.ending
}

// Keep serves requests until ctx ends, and then ends like End. It begins with a listening
// socket, or listens itself if that is nil, and again after each pause while that fails, or
// after the socket has failed. told gets each error, and nil when requests are answered.
func (s *Server) Keep(ctx context.Context, l net.Listener, listen func() (net.Listener, error), pause time.Duration, told func(error)) {
	ended := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(ended)
		s.End()
	})
	for l != nil || ctx.Err() == nil {
		var err error
		if l == nil {
			l, err = listen()
		}
		if err == nil {
			told(nil)
			err = s.Serve(l)
			l = nil
		}
		if errors.Is(err, http.ErrServerClosed) {
			break
		}
		told(err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	<-ended
}
