package health

import (
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/service"
)

// answerTime bounds how long a client may take to read an answer.
const answerTime = 10 * time.Second

// opener listens on the address of /healthz and /livez, and retries until that
// succeeds (A7.7).
type opener struct {
	server *Server
	http   *httpport.Server

	mu     sync.Mutex
	timer  *time.Timer // guarded by mu
	told   once.Trouble
	closed bool
}

// open listens on the address, or schedules another attempt.
func (o *opener) open() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	options := &o.server.options
	l, err := options.Listen("tcp", options.Address)
	if err != nil {
		o.laterLocked(err)
		return
	}
	if o.told.Over() {
		options.Logger.Info().Str("address", options.Address).Msg("/healthz is served now")
	}
	go func() {
		if err := o.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.laterLocked(err)
		}
	}()
}

func (o *opener) laterLocked(err error) {
	options := &o.server.options
	if text := err.Error(); o.told.New(text) {
		options.Logger.Error().Err(err).Str("event", "FailedToStartProxierHealthcheck").Msg("/healthz and /livez are not served; trying again")
		options.Event(service.Name{}, "FailedToStartProxierHealthcheck", text)
	}
	if o.closed {
		return
	}
	wait := healthzRetry
	if options.Retry > 0 {
		wait = options.Retry
	}
	o.timer = time.AfterFunc(wait, o.open)
}

func (o *opener) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	if o.timer != nil {
		o.timer.Stop()
	}
	_ = o.http.Close() // an error of a listening socket has no effect
}
