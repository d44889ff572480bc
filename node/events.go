package node

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
)

// What follows becomes events of the API (A.9), beside lines in the log; without
// a cluster it goes nowhere.

// sendPort reports that a port of a Service is not served here.
func (p *Proxy) sendPort(svc service.Name, text string) {
	p.events.Send(kubernetes.Event{Service: svc, Warning: true, Reason: "FailedToClaimPort", Action: "Listen", Note: text + " (node " + p.config.Policy.NodeName + ")"})
}

// needEndpoints reports that connections to a service port wait for its first endpoint. It runs on
// an event loop. The time in the note makes each event distinct.
func (p *Proxy) needEndpoints(port *service.Port) {
	p.log.Info().Str("object", "Service "+port.Name.Name.String()).Msg("connections wait for endpoints, up to " + port.Hold.String())
	p.events.Send(kubernetes.Event{
		Service: port.Name.Name, Reason: kubernetes.NeedEndpoints, Action: "Hold",
		Note: "since " + time.Now().Format(time.TimeOnly) + ", connections on node " + p.config.Policy.NodeName + " wait for endpoints, up to " + port.Hold.String(),
	})
}

// sendHealth reports that a port for health checks is not served.
func (p *Proxy) sendHealth(svc service.Name, reason, text string) {
	action := "Listen"
	if svc == (service.Name{}) {
		action = "StartKubeProxy"
		if p.config.HardFail {
			select {
			case p.fatal <- errors.New("/healthz and /livez: " + text):
			default: // it ends already
			}
		}
	}
	p.events.Send(kubernetes.Event{Service: svc, Warning: true, Reason: reason, Action: action, Note: text})
}

// metricsRetry is the pause before the address of the metrics is tried again when it
// is taken, for example by a kube-proxy that is still running.
const metricsRetry = 5 * time.Second

// serveMetrics answers on the address of the metrics until ctx ends.
func (p *Proxy) serveMetrics(ctx context.Context) {
	listen := func() (net.Listener, error) { return admin.Listen(p.config.MetricsAddress, p.ports.Listen) }
	admin.NewServer(p.pages, &p.metricsConns).Keep(ctx, p.metrics, listen, metricsRetry, p.logUnserved("the metrics are", func(err error) {
		p.events.Send(kubernetes.Event{Warning: true, Reason: "FailedToStartMetricServer", Action: "StartKubeProxy", Note: err.Error()})
	}))
}
