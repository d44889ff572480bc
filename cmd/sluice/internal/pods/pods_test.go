package pods

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestChoose: each node has one pod, also in a rolling update, and what cannot be asked is
// named.
func TestChoose(t *testing.T) {
	pod := func(node, name string, age int, phase corev1.PodPhase, ready bool) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1_000_000-int64(age), 0))}}
		p.Spec.NodeName, p.Status.Phase = node, phase
		if ready {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		return p
	}
	const running, pending = corev1.PodRunning, corev1.PodPending
	for name, tt := range map[string]struct {
		pods  []corev1.Pod
		nodes []string
		want  string
	}{
		"one of each node":    {[]corev1.Pod{pod("b", "b1", 0, running, true), pod("a", "a1", 0, running, true)}, nil, "a a1, b b1"},
		"the ready one":       {[]corev1.Pod{pod("a", "old", 9, running, true), pod("a", "new", 1, running, false)}, nil, "a old"},
		"the newer one":       {[]corev1.Pod{pod("a", "old", 9, running, true), pod("a", "new", 1, running, true)}, nil, "a new"},
		"the one that runs":   {[]corev1.Pod{pod("a", "new", 1, pending, false), pod("a", "old", 9, running, false)}, nil, "a old"},
		"none that runs":      {[]corev1.Pod{pod("a", "new", 1, pending, false)}, nil, "a new: its pod new is Pending"},
		"a pod without node":  {[]corev1.Pod{pod("", "new", 1, pending, false)}, nil, "(none) new: its pod new is Pending"},
		"chosen nodes, twice": {[]corev1.Pod{pod("b", "b1", 0, running, true), pod("a", "a1", 0, running, true)}, []string{"c", "b", "c"}, "b b1, c : it has no pod of Sluice"},
	} {
		var got []string
		for _, p := range choose(tt.pods, tt.nodes) {
			text := p.Node + " " + p.Name
			if p.Trouble != nil {
				text += ": " + p.Trouble.Error()
			}
			got = append(got, text)
		}
		check.Equalf(t, strings.Join(got, ", "), tt.want, "%s", name)
	}
}
