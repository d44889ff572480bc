package main

import (
	"net/http"
	"os"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/explain"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/live/socket"
)

// adminSocketOff is a value of --admin-socket, as socket.Auto is.
const adminSocketOff = "off"

// openLive opens what answers questions about now: the admin socket, and the page.
func (p *proxy) openLive() error {
	if p.options.adminSocket == adminSocketOff && p.options.web.address == "" {
		return nil
	}
	answers, err := p.answers()
	if err != nil {
		return err
	}
	if p.options.adminSocket != adminSocketOff {
		if err := p.openAdminSocket(serve.New(answers)); err != nil {
			return err
		}
	}
	return p.openWeb(answers)
}

// answers returns what the answers of the admin API are made from.
func (p *proxy) answers() (serve.Options, error) {
	o := p.options
	view := live.New(p.conntrack, p.onLoops())
	history, err := live.NewHistory(view, o.history)
	if err != nil {
		return serve.Options{}, err
	}
	return serve.Options{
		View: view, History: history,
		Version: api.Version{
			API: "v1", Version: version, Node: o.hostname, PID: os.Getpid(), Started: p.started.UTC(), Namespace: socket.Namespace(),
		},
		Policy: p.manager.Policy,
		MayAct: func(r *http.Request) bool { return socket.MayAct(r.Context()) },
		Status: p.status,
		Config: func() map[string]string { return *p.flags.Load() },
		Explain: func(protocol, from, to string, text bool) (any, error) {
			q, err := explain.ParseQuestion(protocol, from, to)
			if err != nil {
				return nil, err
			}
			return explain.Ask(p.manager.Policy(), q, text), nil
		},
		Destinations: p.destinations,
		Drains:       serve.NewDrains(p.drain),
		SetVerbosity: p.verbosity.set,
		Log:          p.log,
	}, nil
}

// openAdminSocket listens on the admin socket. A default that cannot be made is no
// error: the proxy serves without it.
func (p *proxy) openAdminSocket(h http.Handler) (err error) {
	o := p.options
	if o.adminSocket != socket.Auto {
		p.admin, err = socket.Listen(o.adminSocket, h)
		return err
	}
	var why error
	p.admin, why, err = socket.ListenDefault(o.steering.instance(), h)
	switch {
	case err != nil:
		p.log.Warn().Err(why).AnErr("abstract", err).Msg("there is no admin socket: sluice conns and others cannot ask this proxy")
	case why != nil:
		p.log.Debug().Err(why).Str("socket", p.admin.Name()).Msg("the admin socket has an abstract name")
	}
	return nil
}

// onLoops posts to the loop of each shard of the table of connections.
func (p *proxy) onLoops() conntrack.Post { return conntrack.OnLoops(p.allLoops()) }

// allLoops returns the loop of each shard.
func (p *proxy) allLoops() (loops []*poll.Loop) {
	for _, l := range p.loops {
		loops = append(loops, l.Poll)
	}
	if p.flows != nil {
		loops = append(loops, p.flows.loop)
	}
	return loops
}
