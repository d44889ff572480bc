package service

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestProxyProtocolOfAService: TCP ports have what the annotations say; a wrong value is
// named and has no effect.
func TestProxyProtocolOfAService(t *testing.T) {
	for _, tt := range []struct {
		send, accept string
		wantSend     uint8
		wantAccept   string
		problem      string
	}{
		{"", "", 0, "[]", ""},
		{"v1", "", 1, "[]", ""},
		{"v2", "10.0.0.0/8, fd00::1/64", 2, "[10.0.0.0/8 fd00::/64]", ""},
		{"2", "", 0, "[]", `annotation sluice.dev/proxy-protocol: "2" is not one of v1, v2`},
		{"", "10.0.0.1", 0, "[]", `annotation sluice.dev/accept-proxy-protocol: "10.0.0.1" is not a list`},
		{"", "10.0.0.0/8,", 0, "[]", "is not a list"},
		{"", strings.Repeat("10.0.0.0/8,", mostProxies) + "10.0.0.0/8", 0, "[]", "of 1 to 64 CIDRs"},
	} {
		svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
			s.Annotations = map[string]string{}
			if tt.send != "" {
				s.Annotations["sluice.dev/proxy-protocol"] = tt.send
			}
			if tt.accept != "" {
				s.Annotations["sluice.dev/accept-proxy-protocol"] = tt.accept
			}
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "datagrams", Port: 53, Protocol: corev1.ProtocolUDP})
		})
		snap := NewStore(StoreOptions{}).Apply(services(svc))
		for _, p := range snap.Ports {
			switch {
			case p == nil:
			case p.Name.Protocol == UDP && (p.SendProxy != 0 || p.AcceptProxy != nil):
				t.Errorf("%q, %q: a UDP port has %d, %v", tt.send, tt.accept, p.SendProxy, p.AcceptProxy)
			case p.Name.Protocol == TCP && (p.SendProxy != tt.wantSend || fmt.Sprint(p.AcceptProxy) != tt.wantAccept):
				t.Errorf("%q, %q: %d, %v; want %d, %s", tt.send, tt.accept, p.SendProxy, p.AcceptProxy, tt.wantSend, tt.wantAccept)
			}
		}
		var problems string
		for _, problem := range snap.Problems {
			problems += problem.Text
		}
		if (problems != "") != (tt.problem != "") || !strings.Contains(problems, tt.problem) {
			t.Errorf("%q, %q: %q, want %q", tt.send, tt.accept, problems, tt.problem)
		}
	}
}

func TestTrusts(t *testing.T) {
	p := Port{AcceptProxy: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/30"), netip.MustParsePrefix("fd00::/64")}}
	for a, want := range map[string]bool{"10.0.0.3": true, "10.0.0.4": false, "fd00::9": true, "fd00:1::9": false} {
		check.Equalf(t, p.Trusts(netip.MustParseAddr(a)), want, "%s", a)
	}
}
