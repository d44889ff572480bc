package main

import (
	"strings"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
)

// What follows becomes events of the API (A.9), beside lines in the log; without
// a cluster it goes nowhere.

// sendProblem tells whoever looks after a Service what is wrong with it.
func (p *proxy) sendProblem(problem service.Problem) {
	name, ok := strings.CutPrefix(problem.Object, service.KindService.String()+" ")
	if !ok {
		return
	}
	namespace, name, _ := strings.Cut(name, "/")
	p.events.Send(kubernetes.Event{
		Service: service.Name{Namespace: namespace, Name: name}, Warning: true,
		Reason: "ServiceNotServedInFull", Action: "Intake", Note: problem.Text,
	})
}

// sendPort tells that a port of a Service is not served here.
func (p *proxy) sendPort(svc service.Name, text string) {
	p.events.Send(kubernetes.Event{Service: svc, Warning: true, Reason: "FailedToClaimPort", Action: "Listen", Note: text + " (node " + p.options.hostname + ")"})
}

// sendHealth tells that a port for health checks is not served.
func (p *proxy) sendHealth(svc service.Name, reason, text string) {
	action := "Listen"
	if svc == (service.Name{}) {
		action = "StartKubeProxy"
	}
	p.events.Send(kubernetes.Event{Service: svc, Warning: true, Reason: reason, Action: action, Note: text})
}
