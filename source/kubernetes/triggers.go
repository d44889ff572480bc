package kubernetes

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/service"
)

// triggers reads from EndpointSlices when a Pod or Service changed, for kube-proxy's
// metric network_programming_duration. The annotation stays on the slice until the
// next change, so only a new time counts.
type triggers struct {
	last map[service.Name]string
}

func newTriggers() *triggers { return &triggers{last: make(map[service.Name]string)} }

// next returns the time of a change, unless it was seen before.
func (t *triggers) next(name service.Name, slice *discoveryv1.EndpointSlice) (time.Time, bool) {
	if slice == nil {
		delete(t.last, name)
		return time.Time{}, false
	}
	text := slice.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if text == "" || text == t.last[name] {
		return time.Time{}, false
	}
	t.last[name] = text
	at, err := time.Parse(time.RFC3339Nano, text)
	return at, err == nil
}
