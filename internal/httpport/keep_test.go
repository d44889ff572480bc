package httpport

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A server that cannot listen tries again, and once more when its socket fails; at the
// end its address is free.
func TestKeep(t *testing.T) {
	refused := errors.New("refused")
	sockets := make(chan net.Listener, 2)
	attempts := 0
	listen := func() (net.Listener, error) {
		if attempts++; attempts == 1 {
			return nil, refused
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		sockets <- l
		return l, err
	}
	told := make(chan error, 8)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := New(new(Group), http.NotFoundHandler(), time.Minute)
		s.Keep(ctx, nil, listen, time.Millisecond, func(err error) { told <- err })
	}()
	answers := func(l net.Listener) {
		t.Helper()
		r := must.Get(http.Get("http://" + l.Addr().String()))(t)
		_ = r.Body.Close()
		check.Equalf(t, r.StatusCode, http.StatusNotFound, "answered with %s", r.Status)
	}
	first := <-sockets
	answers(first)
	_ = first.Close()
	second := <-sockets
	answers(second)
	cancel()
	<-done
	if l, err := net.Listen("tcp", second.Addr().String()); err != nil {
		t.Errorf("the address is not free afterwards: %v", err)
	} else {
		_ = l.Close()
	}
	close(told)
	errs := slices.Collect(func(yield func(error) bool) {
		for err := range told {
			if !yield(err) {
				return
			}
		}
	})
	if len(errs) != 4 || !errors.Is(errs[0], refused) || errs[1] != nil || !errors.Is(errs[2], net.ErrClosed) || errs[3] != nil {
		t.Errorf("told %v", errs)
	}
}

// A context that has ended leaves nothing behind.
func TestKeepAfterTheEnd(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, first := range []net.Listener{nil, l} {
		New(new(Group), http.NotFoundHandler(), time.Minute).Keep(ctx, first, func() (net.Listener, error) {
			t.Error("it listens")
			return nil, net.ErrClosed
		}, time.Hour, func(error) {})
	}
	check.ErrorIsf(t, must.Err(l.Accept()), net.ErrClosed, "its socket is open")
}

// Servers take over a listening socket from each other, one after the other, while clients
// ask without a pause, each on a connection of its own: every request is answered.
func TestEndAnswersWhatIsAccepted(t *testing.T) {
	first := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	url := "http://" + first.Addr().String()
	stop := make(chan struct{})
	var clients sync.WaitGroup
	var asked atomic.Int64
	for range 4 {
		clients.Go(func() {
			client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
			for {
				select {
				case <-stop:
					return
				default:
				}
				r, err := client.Get(url)
				if err != nil {
					t.Error(err)
					return
				}
				_ = r.Body.Close()
				asked.Add(1)
			}
		})
	}
	serve := func(l net.Listener) (end func()) {
		s := New(&Group{Max: 1000}, http.NotFoundHandler(), time.Minute)
		s.grace = time.Minute // clients wait for a processor on a busy machine
		served := make(chan struct{})
		go func() {
			defer close(served)
			_ = s.Serve(l)
		}()
		return func() {
			s.End()
			<-served
		}
	}
	var leaving sync.WaitGroup
	l, end := first, serve(first)
	for asked.Load() < 2000 && !t.Failed() {
		before := asked.Load()
		wait.For(t, "clients are answered", time.Minute, func() error {
			if asked.Load() < before+8 && !t.Failed() {
				return errors.New("not yet")
			}
			return nil
		})
		f := must.Get(l.(*net.TCPListener).File())(t)
		next, err := net.FileListener(f)
		_ = f.Close()
		must.OK(t, err)
		leaving.Go(end)
		l, end = next, serve(next)
	}
	close(stop)
	clients.Wait()
	end()
	leaving.Wait()
}
