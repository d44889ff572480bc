package node

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/web"
)

// openWeb listens on the address of the page. With a cluster it is tried again while
// the address cannot be taken: serving is more important.
func (p *Proxy) openWeb(answers serve.Options) (err error) {
	o := &p.config
	if o.PageAddress == "" {
		return nil
	}
	answers.MayAct = func(*http.Request) bool { return false }
	p.page, err = web.Listen(o.PageAddress, web.Options{API: serve.New(answers), Hosts: o.PageHosts})
	if err != nil && (p.page == nil || o.HardFail || p.cluster == nil) {
		return err
	}
	if host, _, err := net.SplitHostPort(o.PageAddress); err == nil {
		if a, err := netip.ParseAddr(host); err == nil && !a.IsLoopback() {
			p.log.Warn().Str("address", o.PageAddress).Msg("the page has no login: everybody who reaches its address sees all connections")
		}
	}
	return nil
}

// webRetry is the pause before the address of the page is tried again.
const webRetry = 5 * time.Second

// servePage serves the page until ctx ends.
func (p *Proxy) servePage(ctx context.Context) {
	p.page.Keep(ctx, webRetry, p.logUnserved("the page is", func(error) {}))
}

// logUnserved returns a function that logs once that something is not served, with the error, and
// once that it is served again. It calls failed with the error.
func (p *Proxy) logUnserved(what string, failed func(error)) func(error) {
	var failing once.Trouble
	return func(err error) {
		switch {
		case err == nil && failing.Over():
			p.log.Info().Msg(what + " served now")
		case err != nil && failing.New(err.Error()):
			p.log.Error().Err(err).Msg(what + " not served; trying again")
			failed(err)
		}
	}
}
