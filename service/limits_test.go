package service

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestLimitsOfAService: TCP and SCTP ports have the limits, and a wrong
// value is named and has no effect.
func TestLimitsOfAService(t *testing.T) {
	for _, tt := range []struct {
		annotation, value string
		limits            Limits
		problem           string
	}{
		{"max-connections", "1", Limits{Connections: 1}, ""},
		{"max-connections-per-endpoint", "1000000", Limits{PerEndpoint: 1000000}, ""},
		{"max-connections", "0", Limits{}, `max-connections: "0" is not a number from 1 to 1000000`},
		{"max-connections-per-endpoint", "many", Limits{}, `max-connections-per-endpoint: "many" is not`},
		{"queue-timeout", "5s", Limits{Queue: 5 * time.Second}, "queue-timeout has no effect without a limit"},
		{"queue-timeout", "11m", Limits{}, `queue-timeout: "11m" is not a duration such as 30s, of 1ms to 10m0s`},
	} {
		svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
			s.Annotations = map[string]string{"sluice.dev/" + tt.annotation: tt.value}
			s.Spec.Ports = append(s.Spec.Ports,
				corev1.ServicePort{Name: "udp", Port: 53, Protocol: corev1.ProtocolUDP},
				corev1.ServicePort{Name: "sctp", Port: 53, Protocol: corev1.ProtocolSCTP})
		})
		snap := NewStore(StoreOptions{}).Apply(services(svc))
		for _, p := range snap.Ports {
			if p == nil {
				continue
			}
			want := tt.limits
			if p.Name.Protocol == UDP {
				want = Limits{}
			}
			check.Equalf(t, p.Limits, want, "%s %q: limits of a port of %s", tt.annotation, tt.value, p.Name.Protocol)
		}
		var problems string
		for _, problem := range snap.Problems {
			problems += problem.Text
		}
		if (problems != "") != (tt.problem != "") || !strings.Contains(problems, tt.problem) {
			t.Errorf("%s %q: %q, want %q", tt.annotation, tt.value, problems, tt.problem)
		}
		if err := CheckAnnotation(tt.annotation, tt.value, false); (err != nil) != (tt.limits == Limits{}) {
			t.Errorf("%s %q: %v", tt.annotation, tt.value, err)
		}
	}
}
