package service

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestTimeoutsOfAService: an annotation replaces the default, 0 means never, and a wrong
// value is named and leaves the default.
func TestTimeoutsOfAService(t *testing.T) {
	const idle, half = time.Hour, time.Minute
	for _, tt := range []struct {
		idle, half         string
		wantIdle, wantHalf time.Duration // 0: never
		problem            string
	}{
		{"", "", idle, half, ""},
		{"10m", "", 10 * time.Minute, half, ""},
		{"30s", "", 30 * time.Second, 30 * time.Second, ""},
		{"0", "", 0, half, ""},
		{"", "5s", idle, 5 * time.Second, ""},
		{"", "0", idle, idle, ""},
		{"0", "0", 0, 0, ""},
		{"2h", "90m", 2 * time.Hour, 90 * time.Minute, ""},
		{"10", "", idle, half, `annotation sluice.dev/idle-timeout: "10" is not a duration`},
		{"", "-5s", idle, half, `annotation sluice.dev/half-closed-timeout: "-5s" is not a duration`},
		{"1ms", "", idle, half, "of 1s or more"},
	} {
		svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
			s.Annotations = map[string]string{}
			if tt.idle != "" {
				s.Annotations["sluice.dev/idle-timeout"] = tt.idle
			}
			if tt.half != "" {
				s.Annotations["sluice.dev/half-closed-timeout"] = tt.half
			}
		})
		snap := NewStore(StoreOptions{}).Apply(services(svc))
		p := snap.Ports[len(snap.Ports)-1]
		check.Equalf(t, p.QuietFor(false, idle, half), tt.wantIdle, "idle %q, half-closed %q", tt.idle, tt.half)
		check.Equalf(t, p.QuietFor(true, idle, half), tt.wantHalf, "idle %q, half-closed %q, half-closed", tt.idle, tt.half)
		var problems string
		for _, problem := range snap.Problems {
			problems += problem.Text
		}
		if (problems != "") != (tt.problem != "") || !strings.Contains(problems, tt.problem) {
			t.Errorf("idle %q, half-closed %q: %q, want %q", tt.idle, tt.half, problems, tt.problem)
		}
	}
	var none *Port
	check.Equalf(t, none.QuietFor(false, idle, half), idle, "without a port")
}

// TestDurationsOfAService: the annotations have an effect on the protocols that they are for, and
// a wrong value is named and has none.
func TestDurationsOfAService(t *testing.T) {
	type want struct{ tcp, sctp, udp time.Duration }
	for _, tt := range []struct {
		annotation, text string
		of               func(*Port) time.Duration
		want             want
		problem          string
	}{
		{"drain", "30s", func(p *Port) time.Duration { return p.Drain }, want{30 * time.Second, 30 * time.Second, 0}, ""},
		{"drain", "25h", func(p *Port) time.Duration { return p.Drain }, want{}, `annotation sluice.dev/drain: "25h" is not a duration such as 30s, of 1s to 24h0m0s; connections stay`},
		{"drain", "0", func(p *Port) time.Duration { return p.Drain }, want{}, `annotation sluice.dev/drain: "0" is not a duration`},
		{"slow-start", "30s", func(p *Port) time.Duration { return p.SlowStart }, want{30 * time.Second, 30 * time.Second, 30 * time.Second}, ""},
		{"slow-start", "30", func(p *Port) time.Duration { return p.SlowStart }, want{}, `annotation sluice.dev/slow-start: "30" is not a duration such as 30s, of 1s to 1h0m0s; new endpoints have`},
		{"rebalance", "5s", func(p *Port) time.Duration { return p.Rebalance }, want{tcp: 5 * time.Second}, ""},
		{"rebalance", "yes", func(p *Port) time.Duration { return p.Rebalance }, want{}, `annotation sluice.dev/rebalance: "yes" is not a duration such as 30s, of 1s to 1h0m0s; no idle`},
		{"rebalance", "5s affinity", func(p *Port) time.Duration { return p.Rebalance }, want{}, "annotation sluice.dev/rebalance: clients with session affinity"},
	} {
		svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
			text, affinity := strings.CutSuffix(tt.text, " affinity")
			if s.Annotations = map[string]string{"sluice.dev/" + tt.annotation: text}; affinity {
				s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			}
			for _, protocol := range []corev1.Protocol{corev1.ProtocolUDP, corev1.ProtocolSCTP} {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: strings.ToLower(string(protocol)), Port: 53, Protocol: protocol})
			}
		})
		snap := NewStore(StoreOptions{}).Apply(services(svc))
		for _, p := range snap.Ports {
			if p == nil {
				continue
			}
			if w := map[Protocol]time.Duration{TCP: tt.want.tcp, SCTP: tt.want.sctp, UDP: tt.want.udp}[p.Name.Protocol]; tt.of(p) != w {
				t.Errorf("%s %q: a port of %s has %s, want %s", tt.annotation, tt.text, p.Name.Protocol, tt.of(p), w)
			}
		}
		var problems string
		for _, problem := range snap.Problems {
			problems += problem.Text
		}
		if (problems != "") != (tt.problem != "") || !strings.Contains(problems, tt.problem) {
			t.Errorf("%s %q: %q, want %q", tt.annotation, tt.text, problems, tt.problem)
		}
	}
}

// TestHoldOfAService: TCP and SCTP ports have it; a wrong value is named and holds nothing.
func TestHoldOfAService(t *testing.T) {
	for text, want := range map[string]time.Duration{"1s": time.Second, "10m": 10 * time.Minute, "11m": 0, "999ms": 0, "30": 0, "": 0} {
		svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
			s.Annotations = map[string]string{"sluice.dev/hold": text}
			for _, protocol := range []corev1.Protocol{corev1.ProtocolUDP, corev1.ProtocolSCTP} {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: strings.ToLower(string(protocol)), Port: 53, Protocol: protocol})
			}
		})
		snap := NewStore(StoreOptions{}).Apply(services(svc))
		for _, p := range snap.Ports {
			if p == nil {
				continue
			}
			if p.Name.Protocol == UDP && p.Hold != 0 || p.Name.Protocol != UDP && p.Hold != want {
				t.Errorf("%q: a port of %s has %s", text, p.Name.Protocol, p.Hold)
			}
		}
		if named := len(snap.Problems) == 1 && strings.Contains(snap.Problems[0].Text, "annotation sluice.dev/hold: "); named != (want == 0) {
			t.Errorf("%q: problems are %v", text, snap.Problems)
		}
	}
}
