package policy

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
)

func TestChanged(t *testing.T) {
	st := newStore()
	var list []svc
	for i := range 2*chunkSize + 1 { // three chunks
		list = append(list, svc{name: fmt.Sprintf("s%03d", i), clusterIPs: fmt.Sprintf("10.96.0.%d", i), endpoints: []string{"10.1.0.1"}})
	}
	list[3].annotations = map[string]string{"sluice.dev/topology-keys": "rack,*"}
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
		{"the configuration", service.Change{}, Config{MasqueradeAll: true}, all},
		{"gone, with its chunk", service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: "default", Name: "s128"}}}}, Config{MasqueradeAll: true}, []service.PortID{128}},
	} {
		next := Compile(table, st.Apply(step.change), step.cfg)
		if got := slices.Collect(next.Changed(table)); !slices.Equal(got, step.want) {
			t.Errorf("%s: %v, want %v", step.what, got, step.want)
		}
		// The same holds where nothing is shared.
		alone := slices.Collect(Compile(nil, next.Snapshot(), step.cfg).Changed(table))
		for _, id := range step.want {
			if !slices.Contains(alone, id) {
				t.Errorf("%s, compiled anew: %v lacks %d", step.what, alone, id)
			}
		}
		table = next
	}
}
