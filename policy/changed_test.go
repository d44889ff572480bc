package policy

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

func TestChanged(t *testing.T) {
	st := newStore()
	var list []svc
	for i := range 2*chunkSize + 1 { // three chunks
		list = append(list, svc{name: fmt.Sprintf("s%03d", i), clusterIPs: fmt.Sprintf("10.96.0.%d", i), endpoints: []string{"10.1.0.1"}})
	}
	list[3].annotations = map[string]string{"sluice.dev/topology-keys": "rack,*"}
	list[4].external, list[4].externalIPs = "Local", "192.0.2.1"
	all := make([]service.PortID, len(list))
	for i := range all {
		all[i] = service.PortID(i)
	}
	table := Compile(nil, &service.Snapshot{}, Config{})
	for _, step := range []struct {
		what   string
		change service.Change
		cfg    Config
		want   []service.PortID
	}{
		{"all are new", change(t, list...), Config{}, all},
		{"nothing", service.Change{}, Config{}, nil},
		{"an endpoint", change(t, svc{name: "s070", clusterIPs: "10.96.0.70", endpoints: []string{"10.1.0.2"}}), Config{}, []service.PortID{70}},
		{"another node's label", service.Change{Nodes: []*corev1.Node{nodeObject("n1", map[string]string{"rack": "1"})}}, Config{}, []service.PortID{3}},
		{"what only verdicts depend on", service.Change{}, Config{MasqueradeAll: true}, []service.PortID{}},
		{"local pods", service.Change{}, Config{ClusterCIDRs: prefixes("10.1.0.0/24")}, []service.PortID{3, 4}},
		{"the node's addresses", service.Change{}, Config{NodeAddresses: addresses("172.16.0.1")}, all},
		{"gone, with its chunk", service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: "default", Name: "s128"}}}}, Config{NodeAddresses: addresses("172.16.0.1")}, []service.PortID{128}},
	} {
		next := Compile(table, st.Apply(step.change), step.cfg)
		check.EqualSlicesf(t, slices.Collect(next.Changed(table)), step.want, "%s", step.what)
		// The same holds where nothing is shared.
		alone := slices.Collect(Compile(nil, next.Snapshot(), step.cfg).Changed(table))
		if i := slices.IndexFunc(step.want, func(id service.PortID) bool { return !slices.Contains(alone, id) }); i >= 0 {
			t.Errorf("%s, compiled anew: %v lacks %d", step.what, alone, step.want[i])
		}
		table = next
	}
}
