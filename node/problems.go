package node

import (
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// reportProblems logs each problem of a snapshot once, and again when it returns. If
// a namespace has too many in a minute, the others are logged with a later change.
func (p *Proxy) reportProblems(snap *service.Snapshot) {
	current := make(map[service.Problem]bool, len(snap.Problems))
	now := time.Now()
	for _, problem := range snap.Problems {
		if p.reported[problem] {
			current[problem] = true
			continue
		}
		subject := namespaceOf(problem.Object)
		last, ok := p.lines.Take(subject, now)
		if !ok {
			continue
		}
		current[problem] = true
		LogProblem(p.log, p.manifests, problem)
		p.sendProblem(problem)
		if last {
			p.log.Warn().Str("object", subject).Msgf("had %d problems in a minute: further ones are logged with a later change; sluice_config_problems counts them all", once.PerMinute)
		}
	}
	p.reported = current
}

// LogProblem logs a problem of an object, with its file and line if it is of a
// manifest. from may be nil.
func LogProblem(log zerolog.Logger, from *manifests.Watcher, problem service.Problem) {
	if from != nil {
		if where := from.Where(problem.Object); where != "" {
			log.Warn().Msgf("%s: %s: %s", where, problem.Object, problem.Text)
			return
		}
	}
	log.Warn().Str("object", problem.Object).Msg(problem.Text)
}

// namespaceOf returns the namespace of an object, such as "Namespace default" for
// "Service default/web", or the object itself if it has none.
func namespaceOf(object string) string {
	_, name, _ := strings.Cut(object, " ")
	if namespace, _, ok := strings.Cut(name, "/"); ok {
		return "Namespace " + namespace
	}
	return object
}

// sendProblem sends an event about what is wrong with a Service.
func (p *Proxy) sendProblem(problem service.Problem) {
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
