package kubernetes

import (
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// triggers reads from EndpointSlices when a Pod or Service changed, for kube-proxy's
// metric network_programming_duration. The annotation stays on the slice until the
// next change, so only a new time counts.
type triggers struct {
	last map[service.Name]string
}

func newTriggers() *triggers { return &triggers{last: make(map[service.Name]string)} }

// next returns the time of a change, unless it was seen before. text is that of the slice's
// annotation; empty if there is none, or no slice.
func (t *triggers) next(name service.Name, text string) (time.Time, bool) {
	if text == "" {
		delete(t.last, name)
		return time.Time{}, false
	}
	if text == t.last[name] {
		return time.Time{}, false
	}
	t.last[name] = text
	at, err := time.Parse(time.RFC3339Nano, text)
	return at, err == nil
}
