package node

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestMissingNodeIsLogged: after 5 s and then every minute the log says that this
// node has no object, or no podCIDRs where they are needed, and once that it has.
func TestMissingNodeIsLogged(t *testing.T) {
	node := func(name string, cidrs ...string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: cidrs}}
	}
	for _, test := range []struct {
		name, healthz string
		detect        policy.DetectLocal
		cluster       bool
		nodes         []*corev1.Node // the last one is this node's, which comes late
		want          string
	}{
		{"a wrong name in a cluster", "", 0, true, nil, "no Node object has this node's name"},
		{"a wrong name in manifests", "", 0, false, []*corev1.Node{node("b")}, "no Node object has this node's name"},
		{"/healthz without an object", "127.0.0.1:1", 0, false, nil, "no Node object has this node's name"},
		{"no podCIDRs", "", policy.DetectNodeCIDR, true, []*corev1.Node{node("a")}, "no podCIDRs"},
		{"manifests without nodes", "", 0, false, nil, ""},
		{"podCIDRs", "", policy.DetectNodeCIDR, true, []*corev1.Node{node("a", "10.244.0.0/24")}, ""},
		{"podCIDRs that nobody needs", "", 0, true, []*corev1.Node{node("a")}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := Config{HealthzAddress: test.healthz, Policy: policy.Config{NodeName: "a", DetectLocal: test.detect}}
				var log bytes.Buffer
				d := newNodeDoubt(&o, zerolog.New(&log), test.cluster)
				wait := func(duration time.Duration) (lines int) {
					end := time.After(duration)
					for {
						select {
						case <-d.timer.C:
							d.remind()
						case <-end:
							lines = strings.Count(log.String(), "\n")
							if test.want != "" && strings.Count(log.String(), test.want) != lines {
								t.Errorf("the log: %s", &log)
							}
							log.Reset()
							return lines
						}
					}
				}
				store := service.NewStore(service.StoreOptions{NodeName: "a"})
				d.update(store.Apply(service.Change{Nodes: test.nodes}))
				want := 0
				if test.want != "" {
					want = 3
				}
				early := wait(nodePatience - time.Millisecond)
				d.update(store.Snapshot()) // a change of something else does not delay it
				later := wait(2*nodeReminder + 2*time.Millisecond)
				if early != 0 || later != want {
					t.Errorf("%d lines within the first %s, want 0, and %d within the next 2 minutes, want %d", early, nodePatience, later, want)
				}
				d.update(store.Apply(service.Change{Nodes: []*corev1.Node{node("a", "10.244.0.0/24")}}))
				check.Equalf(t, strings.Contains(log.String(), "complete now"), test.want != "", "when it has come: %q", &log)
				log.Reset()
				check.Equalf(t, wait(10*time.Minute), 0, "lines after it has come")
			})
		})
	}
}
