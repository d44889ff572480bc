package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	admin "github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/web"
)

// listenForPage opens the listening socket of the page on this machine. The inner
// process, which is in a network of its own, serves it.
func listenForPage(address string) (*os.File, error) {
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("the page: another program listens on %s: take another port, --web=127.0.0.1:8081, or --web=127.0.0.1:0 for a free one", address)
	}
	if err != nil {
		return nil, fmt.Errorf("the page: %w", err)
	}
	defer l.Close()
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, fmt.Errorf("the page: %T is no TCP socket", l)
	}
	return tcp.File()
}

// openPage serves the page of the proxy on the socket that Run has opened, until close.
func (s *show) openPage(ctx context.Context) error {
	l, err := inherited(pageDescriptor)
	if err != nil {
		return fmt.Errorf("the socket of the page: %w", err)
	}
	c, err := admin.Find(ctx, "")
	if err == nil {
		s.page, err = web.On(l, web.Options{API: web.Forward(admin.Transport(c.Name))})
	}
	if err != nil {
		_ = l.Close()
		return fmt.Errorf("the page: %w", err)
	}
	page := s.page
	s.serving.Go(func() { _ = page.Serve(context.WithoutCancel(ctx)) })
	s.out.labelled("page", bold, page.URL(), " ")
	return nil
}
