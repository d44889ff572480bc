package policy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// Drained endpoints serve only if no other is ready, and a change of the set changes
// the decisions about ports that did not change.
func TestDrained(t *testing.T) {
	pod := func(name string) service.Name { return service.Name{Namespace: "shop", Name: name} }
	drained := func(list ...string) Drained {
		set := make(Drained)
		for _, text := range list {
			addr, name, isPod := strings.Cut(text, " ")
			d := Drain{Addr: netip.MustParseAddrPort(addr)}
			if isPod {
				d.Pod = pod(name)
			}
			set[d] = struct{}{}
		}
		return set
	}
	port := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "web"}}, Port: 80}
	v := &port.Families[service.IPv4]
	v.Exists, v.ClusterIP = true, netip.MustParseAddr("10.96.0.10")
	for _, a := range []string{"10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80"} {
		v.Endpoints = append(v.Endpoints, service.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: a != "10.1.0.3:80", Serving: a != "10.1.0.3:80"})
	}
	v.Endpoints[0].Pod = pod("a")
	n := newNode(&service.Snapshot{}, &Config{})
	for _, tt := range []struct {
		set  Drained
		want string
	}{
		{nil, "10.1.0.1:80 10.1.0.2:80"},
		{drained("10.1.0.1:80"), "10.1.0.2:80"},
		{drained("10.1.0.1:0"), "10.1.0.2:80"},
		{drained("10.1.0.1:81"), "10.1.0.1:80 10.1.0.2:80"},
		{drained("10.1.0.1:0 a"), "10.1.0.2:80"},
		{drained("10.1.0.1:80 a"), "10.1.0.2:80"},
		{drained("10.1.0.1:0 b", "10.1.0.2:0 a"), "10.1.0.1:80 10.1.0.2:80"}, // a pod that had the address, or has another one
		{drained("10.1.0.1:80", "10.1.0.2:80"), "10.1.0.1:80 10.1.0.2:80"},   // the last resort
		{drained("10.1.0.3:80"), "10.1.0.1:80 10.1.0.2:80"},                  // drains do not make one serve
		{drained("10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80"), "10.1.0.1:80 10.1.0.2:80"},
	} {
		is := newNode(&service.Snapshot{}, &Config{Drained: tt.set})
		var got []string
		for _, e := range categorize(port, v, is).cluster {
			got = append(got, e.Addr.String())
		}
		check.Equalf(t, strings.Join(got, " "), tt.want, "drained %v: %v", tt.set, got)
		check.Equalf(t, n.compilesAs(is), len(tt.set) == 0, "drained %v: ports are not compiled again", tt.set)
	}
}
