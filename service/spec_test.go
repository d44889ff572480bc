package service

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestServiceIntake applies one Service to an empty Store. want lists what
// leads to it, one "address:port/protocol kind name" after another in the
// order of the text; problems are what the texts of the problems contain.
func TestServiceIntake(t *testing.T) {
	const proxyName = "service.kubernetes.io/service-proxy-name"
	clusterIP := "10.96.0.1:80/TCP ClusterIP default/web"
	vipMode, proxyMode := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	ingress := func(in ...corev1.LoadBalancerIngress) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = in }
	}
	tests := []struct {
		name     string
		proxy    string
		svc      *corev1.Service
		want     []string
		problems []string
	}{
		{"A1.1 no label", "", newService("web", "10.96.0.1"), []string{clusterIP}, nil},
		{"A1.1 a label of any value", "", newService("web", "10.96.0.1", withLabel(proxyName, "other")), nil, nil},
		{"A1.1 an empty label", "", newService("web", "10.96.0.1", withLabel(proxyName, "")), nil, nil},
		{"A1.2 our own name", "sluice", newService("web", "10.96.0.1", withLabel(proxyName, "sluice")), []string{clusterIP}, nil},
		{"A1.2 another's name", "sluice", newService("web", "10.96.0.1", withLabel(proxyName, "other")), nil, nil},
		{"A1.2 no name", "sluice", newService("web", "10.96.0.1"), nil, nil},

		{"A1.4 headless", "", newService("web", "None"), nil, nil},
		{"A1.4 no clusterIP", "", newService("web", ""), nil, []string{"has no clusterIP"}},
		{"A1.4 ExternalName, even with a clusterIP", "", newService("web", "10.96.0.1", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeExternalName
		}), nil, nil},

		{"A1.5 clusterIP alone", "", newService("web", "fd00::1"), []string{"[fd00::1]:80/TCP ClusterIP default/web"}, nil},
		{"A1.5 dual stack", "", newService("web", "10.96.0.1", withClusterIPs("10.96.0.1", "fd00::1"), withFamilies("IPv4", "IPv6")),
			[]string{clusterIP, "[fd00::1]:80/TCP ClusterIP default/web"}, nil},
		{"A1.5 dual stack, IPv6 first", "", newService("web", "fd00::1", withClusterIPs("fd00::1", "10.96.0.1"), withFamilies("IPv6", "IPv4")),
			[]string{clusterIP, "[fd00::1]:80/TCP ClusterIP default/web"}, nil},
		{"A1.5 ipFamilies without clusterIPs", "", newService("web", "10.96.0.1", withFamilies("IPv4")), []string{clusterIP}, nil},
		{"A1.5 clusterIPs without ipFamilies", "", newService("web", "10.96.0.1", withClusterIPs("10.96.0.1", "fd00::1")),
			[]string{clusterIP, "[fd00::1]:80/TCP ClusterIP default/web"}, nil},
		{"A1.5 one family of two clusterIPs", "", newService("web", "10.96.0.1", withClusterIPs("10.96.0.1", "fd00::1"), withFamilies("IPv4")),
			[]string{clusterIP}, nil},
		{"A1.5 clusterIP of the wrong family", "", newService("web", "10.96.0.1", withFamilies("IPv6")), nil,
			[]string{"clusterIP 10.96.0.1 is not of the family IPv6"}},
		{"A1.5 external addresses of a family without clusterIP", "",
			newService("web", "10.96.0.1", withExternalIPs("fd00::5", "192.0.2.5"), withIngress("fd00::6", "192.0.2.6")),
			[]string{clusterIP, "192.0.2.5:80/TCP ExternalIP default/web", "192.0.2.6:80/TCP LoadBalancer default/web"}, nil},

		{"A1.6 TCP, UDP and SCTP on one number", "", newService("dns", "10.96.0.1", withPorts(
			servicePort("dns", "UDP", 53, 0), servicePort("dns", "TCP", 53, 0), servicePort("s", "SCTP", 53, 0))),
			[]string{"10.96.0.1:53/SCTP ClusterIP default/dns:s", "10.96.0.1:53/TCP ClusterIP default/dns:dns", "10.96.0.1:53/UDP ClusterIP default/dns:dns"}, nil},
		{"A1.6 one name and protocol twice", "", newService("web", "10.96.0.1", withPorts(
			servicePort("", "TCP", 80, 0), servicePort("", "TCP", 81, 0))), []string{clusterIP}, []string{"is there twice"}},
		{"A1.6 two names for one number", "", newService("web", "10.96.0.1", withPorts(
			servicePort("a", "TCP", 80, 0), servicePort("b", "TCP", 80, 0))),
			[]string{"10.96.0.1:80/TCP ClusterIP default/web:a"}, []string{"ClusterIP 10.96.0.1:80/TCP belongs to Service default/web:a: left out"}},
		{"no protocol means TCP", "", newService("web", "10.96.0.1", withPorts(servicePort("", "", 80, 0))), []string{clusterIP}, nil},
		{"an unknown protocol", "", newService("web", "10.96.0.1", withPorts(servicePort("x", "QUIC", 1, 0), servicePort("", "TCP", 80, 0))),
			[]string{clusterIP}, []string{`port "x" has the unknown protocol "QUIC"`}},
		{"port 0", "", newService("web", "10.96.0.1", withPorts(servicePort("x", "TCP", 0, 0))), nil, []string{`port "x" has the number 0`}},
		{"port 70000", "", newService("web", "10.96.0.1", withPorts(servicePort("x", "TCP", 70000, 0))), nil, []string{"number 70000"}},
		{"node port 70000", "", newService("web", "10.96.0.1", withPorts(servicePort("", "TCP", 80, 70000))), []string{clusterIP}, []string{"nodePort 70000"}},

		{"A1.7 a bad clusterIP", "", newService("web", "10.96.0.300"), nil, []string{`clusterIP "10.96.0.300" is not an IP address`}},
		{"A1.7 a bad second clusterIP", "", newService("web", "10.96.0.1", withClusterIPs("10.96.0.1", "fd00::zz")),
			[]string{clusterIP}, []string{`clusterIP "fd00::zz" is not an IP address`}},
		{"A1.7 bad external addresses", "", newService("web", "10.96.0.1", withExternalIPs("x", "192.0.2.5"), withIngress("y", "192.0.2.6")),
			[]string{clusterIP, "192.0.2.5:80/TCP ExternalIP default/web", "192.0.2.6:80/TCP LoadBalancer default/web"},
			[]string{`externalIP "x"`, `load balancer IP "y"`}},
		{"A1.7 leading zeros", "", newService("web", "010.096.000.001", withExternalIPs("192.000.002.005")),
			[]string{clusterIP, "192.0.2.5:80/TCP ExternalIP default/web"}, nil},
		{"A1.7 zones are no addresses", "", newService("web", "fe80::1%eth0"), nil, []string{`"fe80::1%eth0" is not an IP address`}},
		{"A1.7 IPv4 in IPv6 is IPv4", "", newService("web", "::ffff:10.96.0.1"), []string{clusterIP}, nil},
		{"A1.7 special addresses", "", newService("web", "10.96.0.1", withExternalIPs("127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.1.1")),
			[]string{clusterIP}, []string{"externalIP 127.0.0.1", "externalIP 0.0.0.0", "externalIP 224.0.0.1", "externalIP 169.254.1.1"}},
		{"A1.7 one address twice", "", newService("web", "10.96.0.1", withExternalIPs("192.0.2.5", "192.0.2.5")),
			[]string{clusterIP, "192.0.2.5:80/TCP ExternalIP default/web"}, nil},
		{"A1.8 externalIPs are always used", "", newService("web", "10.96.0.1", withExternalIPs("192.0.2.5")),
			[]string{clusterIP, "192.0.2.5:80/TCP ExternalIP default/web"}, nil},

		{"A1.9 no ipMode", "", newService("web", "10.96.0.1", ingress(corev1.LoadBalancerIngress{IP: "192.0.2.6"})),
			[]string{clusterIP, "192.0.2.6:80/TCP LoadBalancer default/web"}, nil},
		{"A1.9 ipMode VIP", "", newService("web", "10.96.0.1", ingress(corev1.LoadBalancerIngress{IP: "192.0.2.6", IPMode: &vipMode})),
			[]string{clusterIP, "192.0.2.6:80/TCP LoadBalancer default/web"}, nil},
		{"A1.9 ipMode Proxy", "", newService("web", "10.96.0.1", ingress(corev1.LoadBalancerIngress{IP: "192.0.2.6", IPMode: &proxyMode})),
			[]string{clusterIP}, nil},
		{"A1.9 hostname only", "", newService("web", "10.96.0.1", ingress(corev1.LoadBalancerIngress{Hostname: "lb.example.com"})),
			[]string{clusterIP}, nil},
		{"A3.10 an address of both kinds is a load balancer's", "", newService("web", "10.96.0.1", withExternalIPs("192.0.2.6"), withIngress("192.0.2.6")),
			[]string{clusterIP, "192.0.2.6:80/TCP LoadBalancer default/web"}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			snap := NewStore(StoreOptions{ServiceProxyName: tt.proxy}).Apply(services(tt.svc))
			if got := destinations(t, snap); !slices.Equal(got, tt.want) {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
			got := problemTexts(snap)
			must.Equalf(t, len(got), len(tt.problems), "problems: got %q, want %q", got, tt.problems)
			for i, want := range tt.problems {
				check.Containsf(t, got[i], want, "problem %d", i)
			}
		})
	}
}

// destinations lists what leads to the ports of a snapshot.
func destinations(t *testing.T, s *Snapshot) []string {
	t.Helper()
	var out []string
	for _, p := range s.Ports {
		if p == nil {
			continue
		}
		for d, kind := range p.Destinations {
			ap := dest2text(d)
			out = append(out, fmt.Sprintf("%s %s %s", ap, kind, p.Name))
			if kind == ClusterIP && !s.HasClusterIP(d.Addr) {
				t.Errorf("HasClusterIP(%s) = false", d.Addr)
			}
		}
	}
	slices.Sort(out)
	return out
}

func dest2text(d Destination) string { return addrKey(d).String() }

func TestServicePolicy(t *testing.T) {
	local, cluster := corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster
	set := func(f func(*corev1.ServiceSpec)) *corev1.Service {
		return newService("web", "10.96.0.1", func(s *corev1.Service) { f(&s.Spec) })
	}
	type result struct {
		kind               Type
		internal, external bool
		affinity           time.Duration
		health             uint16
		problems           int
	}
	tests := []struct {
		name string
		svc  *corev1.Service
		want result
	}{
		{"no type", set(func(*corev1.ServiceSpec) {}), result{}},
		{"A2.2 internal Local", set(func(s *corev1.ServiceSpec) { s.InternalTrafficPolicy = &local }), result{internal: true}},
		{"A2.2 internal Cluster", set(func(s *corev1.ServiceSpec) { s.InternalTrafficPolicy = &cluster }), result{}},
		{"A2.2 external Local, node port", set(func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, "Local"
		}), result{kind: TypeNodePort, external: true}},
		{"A2.2 external Local, cluster IP only", set(func(s *corev1.ServiceSpec) { s.ExternalTrafficPolicy = "Local" }), result{}},
		{"A2.2 external Local, external IPs", set(func(s *corev1.ServiceSpec) {
			s.ExternalTrafficPolicy, s.ExternalIPs = "Local", []string{"192.0.2.5"}
		}), result{external: true}},
		{"A5.2 affinity None", set(func(s *corev1.ServiceSpec) { s.SessionAffinity = "None" }), result{}},
		{"A5.2 affinity without timeout", set(func(s *corev1.ServiceSpec) { s.SessionAffinity = "ClientIP" }),
			result{affinity: 3 * time.Hour}},
		{"A5.2 affinity with timeout", set(func(s *corev1.ServiceSpec) {
			s.SessionAffinity = "ClientIP"
			s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr[int32](7)}}
		}), result{affinity: 7 * time.Second}},
		{"A5.2 timeout out of range", set(func(s *corev1.ServiceSpec) {
			s.SessionAffinity = "ClientIP"
			s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr[int32](0)}}
		}), result{affinity: 3 * time.Hour, problems: 1}},
		{"A6.1 health check port", set(func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy, s.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, "Local", 32000
		}), result{kind: TypeLoadBalancer, external: true, health: 32000}},
		{"A6.1 none given", set(func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, "Local"
		}), result{kind: TypeLoadBalancer, external: true, problems: 1}},
		{"A6.1 not with policy Cluster", set(func(s *corev1.ServiceSpec) {
			s.Type, s.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, 32000
		}), result{kind: TypeLoadBalancer}},
		{"A6.1 not for node ports", set(func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy, s.HealthCheckNodePort = corev1.ServiceTypeNodePort, "Local", 32000
		}), result{kind: TypeNodePort, external: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			snap := NewStore(StoreOptions{}).Apply(services(tt.svc))
			p := only(t, snap)
			got := result{p.Type, p.InternalLocal, p.ExternalLocal, p.AffinityTimeout, p.HealthCheckNodePort, len(snap.Problems)}
			check.Equal(t, got, tt.want)
		})
	}
}

func TestSourceRanges(t *testing.T) {
	dual := withClusterIPs("10.96.0.1", "fd00::1")
	tests := []struct {
		name     string
		ranges   []string
		v4, v6   string
		problems int
	}{
		{"A1.7 by family", []string{"10.0.0.0/8", "fd00::/64"}, "[10.0.0.0/8]", "[fd00::/64]", 0},
		{"A1.7 a bad one", []string{"10.0.0.0/8", "10.0.0.0/33", "x"}, "[10.0.0.0/8]", "[::/128]", 2},
		{"A3.10 only bad ones let nobody in", []string{"10.0.0.0/33"}, "[0.0.0.0/32]", "[::/128]", 1},
		{"A3.10 two in one text", []string{"10.0.0.0/8,10.1.0.0/16"}, "[0.0.0.0/32]", "[::/128]", 1},
		{"A3.10 a bad one beside all of a family", []string{"0.0.0.0/0", "x"}, "[]", "[::/128]", 1},
		{"A1.7 leading zeros", []string{"010.000.000.000/8"}, "[10.0.0.0/8]", "[]", 0},
		{"A1.7 bits beyond the prefix", []string{"10.1.2.3/8"}, "[10.0.0.0/8]", "[]", 0},
		{"A3.10 blanks", []string{" 10.0.0.0/8 "}, "[10.0.0.0/8]", "[]", 0},
		{"A3.10 a zero range opens its family", []string{"10.0.0.0/8", "0.0.0.0/0", "fd00::/64"}, "[]", "[fd00::/64]", 0},
		{"A3.10 none", nil, "[]", "[]", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			svc := newService("web", "10.96.0.1", dual, withIngress("192.0.2.6"))
			svc.Spec.LoadBalancerSourceRanges = tt.ranges
			snap := NewStore(StoreOptions{}).Apply(services(svc))
			p := only(t, snap)
			check.Equalf(t, fmt.Sprint(p.Families[IPv4].SourceRanges), tt.v4, "IPv4")
			check.Equalf(t, fmt.Sprint(p.Families[IPv6].SourceRanges), tt.v6, "IPv6")
			check.Equalf(t, len(snap.Problems), tt.problems, "problems: %q", problemTexts(snap))
		})
	}
}

func TestAnnotations(t *testing.T) {
	svc := newService("web", "10.96.0.1", func(s *corev1.Service) {
		s.Annotations = map[string]string{"sluice.dev/balancer": "random", "example.com/sluice.dev/": "x"}
	})
	got := only(t, NewStore(StoreOptions{}).Apply(services(svc))).Annotations
	if len(got) != 1 || got["balancer"] != "random" {
		t.Errorf("got %v", got)
	}
}

func TestTopologyKeys(t *testing.T) {
	tests := []struct {
		name     string
		value    string
		external corev1.ServiceExternalTrafficPolicy
		want     []string
		problems []string
	}{
		{"none", "", "", nil, nil},
		{"one", "kubernetes.io/hostname", "", []string{"kubernetes.io/hostname"}, nil},
		{"several and any", "kubernetes.io/hostname, rack,*", "", []string{"kubernetes.io/hostname", "rack", "*"}, nil},
		{"any before another", "*,rack", "", []string{"*", "rack"}, []string{"has keys after"}},
		{"no label", "a/b/c,rack", "", []string{"a/b/c", "rack"}, []string{`the key "a/b/c"`}},
		{"policy Local wins", "rack", "Local", nil, []string{"exclude each other"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			snap := NewStore(StoreOptions{}).Apply(services(newService("web", "10.96.0.1", func(s *corev1.Service) {
				s.Annotations = map[string]string{"sluice.dev/topology-keys": tt.value}
				s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, tt.external
			})))
			check.EqualSlices(t, only(t, snap).TopologyKeys, tt.want)
			got := problemTexts(snap)
			if len(got) != len(tt.problems) || len(got) > 0 && !strings.Contains(got[0], tt.problems[0]) {
				t.Errorf("problems: got %q, want %q", got, tt.problems)
			}
		})
	}
}
