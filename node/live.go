package node

import (
	"net/http"
	"os"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/explain"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/service"
)

// observe begins to keep records and rates for the admin API, if that is served. The previous
// process may add its own.
func (p *Proxy) observe() (err error) {
	o := &p.config
	if o.AdminSocket == Off && o.PageAddress == "" {
		return nil
	}
	if o.Past > 0 {
		p.past = conntrack.NewPast(p.conntrack, o.Past)
	}
	p.view = live.New(p.conntrack, p.onLoops())
	p.history, err = live.NewHistory(p.view, o.History)
	return err
}

// openLive opens the admin socket and the page.
func (p *Proxy) openLive() error {
	if p.view == nil {
		return nil
	}
	answers := p.answers()
	if p.config.AdminSocket != Off {
		if err := p.openAdminSocket(serve.New(answers)); err != nil {
			return err
		}
	}
	return p.openWeb(answers)
}

// answers returns the sources of the admin API's answers.
func (p *Proxy) answers() serve.Options {
	o := &p.config
	answers := serve.Options{
		View: p.view, History: p.history, Past: p.past, TCP: p.config.RecordTCP,
		Version: api.Version{
			API: "v1", Version: o.Version, Node: o.Policy.NodeName, PID: os.Getpid(), Started: p.started.UTC(), Namespace: socket.Namespace(),
		},
		Policy:   p.manager.Policy,
		Choosing: p.choosing,
		MayAct:   func(r *http.Request) bool { return socket.MayAct(r.Context()) },
		Status:   p.status,
		Config:   o.Flags,
		Explain: func(protocol, from, to string, text bool) (any, error) {
			q, err := explain.ParseQuestion(protocol, from, to)
			if err != nil {
				return nil, err
			}
			return explain.Ask(p.manager.Policy(), q, text, p.choosing, p.changes.of), nil
		},
		Destinations: p.destinations,
		Drains:       p.drains,
		SetVerbosity: p.verbosity.set,
		Log:          p.log,
	}
	if p.cluster != nil {
		answers.PodAt, answers.Pods = p.cluster.PodAt, p.cluster.Pods
	}
	return answers
}

// choosing returns how endpoints are chosen for new connections to a service port.
func (p *Proxy) choosing(port *service.Port) live.Choosing {
	if port.Name.Protocol == service.UDP {
		return live.Choosing{Balancer: p.datagram.Choosing(port)}
	}
	return live.Choosing(p.stream.Choosing(port))
}

// openAdminSocket listens on the admin socket. A default that cannot be made is no
// error: the proxy serves without it.
func (p *Proxy) openAdminSocket(h http.Handler) (err error) {
	o := &p.config
	if o.AdminSocket != socket.Auto {
		p.admin, err = socket.Listen(o.AdminSocket, h)
		return err
	}
	var why error
	p.admin, why, err = socket.ListenDefault(o.Instance, h)
	switch {
	case err != nil:
		p.log.Warn().Err(why).AnErr("abstract", err).Msg("there is no admin socket: sluice conns and others cannot ask this proxy")
	case why != nil:
		p.log.Debug().Err(why).Str("socket", p.admin.Name()).Msg("the admin socket has an abstract name")
	}
	return nil
}
