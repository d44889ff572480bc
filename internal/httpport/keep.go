package httpport

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Keep serves requests until ctx ends, then waits up to a second for those that are
// running. It begins with a listening socket, or listens itself if that is nil, and
// again after each pause while that fails, or after the socket has failed. told gets
// each error, and nil when requests are answered.
func (s *Server) Keep(ctx context.Context, l net.Listener, listen func() (net.Listener, error), pause time.Duration, told func(error)) {
	ended := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(ended)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := s.Shutdown(grace); err != nil {
			_ = s.Close() // aborts the remaining requests
		}
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
