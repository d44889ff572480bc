package main

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/web"
)

// runWebOptions are the flags of the page of sluice run.
type runWebOptions struct {
	address string
	hosts   []string
}

func (o *runWebOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.address, "web-bind-address", "", "address and port of the page that shows what happens now, read-only; a port alone is one of loopback (default: none)")
	f.StringSliceVar(&o.hosts, "web-allowed-hosts", nil, "names by which browsers may ask for the page, beside localhost and the address itself")
}

// validate completes the address.
func (o *runWebOptions) validate() (err error) {
	if o.address != "" {
		o.address, err = pageAddress("web-bind-address", o.address)
	}
	return err
}

// openWeb listens on the address of the page. With a cluster it is tried again while
// the address cannot be taken: serving is more important.
func (p *proxy) openWeb(answers serve.Options) (err error) {
	o := &p.options.web
	if o.address == "" {
		return nil
	}
	answers.MayAct = func(*http.Request) bool { return false }
	p.page, err = web.Listen(o.address, web.Options{API: serve.New(answers), Hosts: o.hosts})
	if err != nil && (p.page == nil || p.options.hardFail || p.cluster == nil) {
		return err
	}
	if host, _, err := net.SplitHostPort(o.address); err == nil {
		if a, err := netip.ParseAddr(host); err == nil && !a.IsLoopback() {
			p.log.Warn().Str("address", o.address).Msg("everybody who reaches the page's address sees who connects to what: it asks nobody who he is")
		}
	}
	return nil
}

// webRetry is the pause before the address of the page is tried again.
const webRetry = 5 * time.Second

// servePage serves the page until ctx ends.
func (p *proxy) servePage(ctx context.Context) {
	p.page.Keep(ctx, webRetry, p.tellServed("the page is", func(error) {}))
}

// tellServed returns a function that logs, once each, that something is not served, which
// it also tells failed, and that it is again.
func (p *proxy) tellServed(what string, failed func(error)) func(error) {
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
