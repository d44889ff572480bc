package node

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestDeparted plays changes of a port whose connections have 10 s, and says after each step
// which endpoints' connections end.
func TestDeparted(t *testing.T) {
	const a, b, c = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"
	name := service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Protocol: service.TCP}
	snapshot := func(id int, drain time.Duration, serving ...string) *service.Snapshot {
		p := &service.Port{Name: name, Drain: drain}
		for _, e := range serving {
			p.Families[service.IPv4].Endpoints = append(p.Families[service.IPv4].Endpoints, service.Endpoint{Addr: netip.MustParseAddrPort(e), Serving: true})
		}
		p.Families[service.IPv4].Endpoints = append(p.Families[service.IPv4].Endpoints, service.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.9:80")}) // never serves
		s := &service.Snapshot{Ports: make([]*service.Port, id+1)}
		s.Ports[id] = p
		return s
	}
	const ten = 10 * time.Second
	type step struct {
		at   int // s
		snap *service.Snapshot
		want []string // of a, b and c
	}
	for what, steps := range map[string][]step{
		"goes":                    {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(0, ten, a), nil}, {29, nil, nil}, {30, nil, []string{b}}, {50, nil, nil}},
		"goes at the beginning":   {{0, snapshot(0, ten, a, b), nil}, {5, snapshot(0, ten, a), nil}, {10, nil, []string{c}}, {15, nil, []string{b}}},
		"is back in time":         {{0, snapshot(0, ten, a), nil}, {10, nil, []string{b, c}}, {20, snapshot(0, ten), nil}, {25, snapshot(0, ten, a), nil}, {40, nil, nil}},
		"two, one after another":  {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(0, ten, b), nil}, {25, snapshot(0, ten), nil}, {30, nil, []string{a}}, {35, nil, []string{b}}},
		"annotation comes":        {{0, snapshot(0, 0, a, b), nil}, {5, snapshot(0, 0, a), nil}, {20, snapshot(0, ten, a), nil}, {29, nil, nil}, {30, nil, []string{b, c}}},
		"annotation goes":         {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(0, ten, a), nil}, {25, snapshot(0, 0, a), nil}, {40, nil, nil}},
		"annotation changes":      {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(0, ten, a), nil}, {22, snapshot(0, 3*time.Second, a), nil}, {23, nil, []string{b}}},
		"the port has another ID": {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(3, ten, a), nil}, {30, nil, []string{b}}},
		"the port goes":           {{0, snapshot(0, ten, a, b), nil}, {10, nil, []string{c}}, {20, snapshot(0, ten, a), nil}, {25, &service.Snapshot{}, nil}, {40, nil, nil}},
	} {
		d, began := newDeparted(), time.Now()
		for _, s := range steps {
			now := began.Add(time.Duration(s.at) * time.Second)
			if s.snap != nil {
				d.update(s.snap, now)
			}
			var got []string
			if o := d.take(now)[name]; o != nil {
				for _, e := range []string{a, b, c} {
					if o.has(netip.MustParseAddrPort(e)) {
						got = append(got, e)
					}
				}
			}
			check.EqualSlicesf(t, got, s.want, "%s: at %d s: end", what, s.at)
		}
		d.timer.Stop()
	}
}

// TestDepartedIsBounded: endpoints that go for a day, each once, take no more memory than some
// thousand; the connections of all of them end.
func TestDepartedIsBounded(t *testing.T) {
	name := service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Protocol: service.TCP}
	d, now := newDeparted(), time.Now()
	defer d.timer.Stop()
	const drain, each = 24 * time.Hour, 1000
	stays := netip.MustParseAddrPort("10.0.0.9:80")
	serve := func(port uint16) {
		p := &service.Port{Name: name, Drain: drain}
		p.Families[service.IPv4].Endpoints = []service.Endpoint{{Addr: stays, Serving: true}}
		for i := range each {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), port)
			p.Families[service.IPv4].Endpoints = append(p.Families[service.IPv4].Endpoints, service.Endpoint{Addr: a, Serving: true})
		}
		d.update(&service.Snapshot{Ports: []*service.Port{p}}, now)
	}
	serve(1)
	now = now.Add(drain)
	d.take(now) // its beginning is over
	for port := range uint16(20) {
		now = now.Add(time.Second)
		serve(2 + port)
		if n := len(d.ports[name].left); n > mostLeft {
			t.Fatalf("%d endpoints that went are remembered, want %d at most", n, mostLeft)
		}
	}
	o := d.take(now.Add(drain))[name]
	for port := range uint16(21) {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, 7}), 1+port)
		check.Equalf(t, o.has(a), port < 20, "connections to %s end", a)
	}
	if o.has(stays) {
		t.Error("connections to an endpoint that still serves end")
	}
}

// TestDepartedRestart: connections of an earlier process whose endpoint went before have the time
// of the annotation from when they are known; others do not put it off.
func TestDepartedRestart(t *testing.T) {
	name := service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Protocol: service.TCP}
	d, began := newDeparted(), time.Now()
	defer d.timer.Stop()
	d.update(&service.Snapshot{Ports: []*service.Port{{Name: name, Drain: 10 * time.Second}}}, began)
	want := func(at int, want bool) {
		t.Helper()
		o := d.take(began.Add(time.Duration(at) * time.Second))[name]
		check.Equalf(t, o != nil && o.has(netip.MustParseAddrPort("10.0.0.1:80")), want, "at %d s, connections end", at)
	}
	restart := func(at int) { d.restart(began.Add(time.Duration(at) * time.Second)) }
	restart(4)
	want(9, false)
	want(10, true)
	want(20, false)
	restart(30)
	restart(36)
	want(39, false)
	want(40, true)
	want(60, false)
}
