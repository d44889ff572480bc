package live

import (
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
)

// Choosing is what new connections to a service port meet now. The zero value is that of a
// port that is not served.
type Choosing struct {
	Balancer *balancer.Balancer
	Held     int // connections that wait for an endpoint
	Queued   int // connections that wait at a limit
}

// Algorithm returns the name of the algorithm, or "".
func (c *Choosing) Algorithm() string {
	if c.Balancer == nil {
		return ""
	}
	return c.Balancer.Algorithm().String()
}

// Standing returns what keeps connections off an endpoint.
func (c *Choosing) Standing(ep netip.AddrPort) (out api.Standing) {
	if c.Balancer == nil {
		return out
	}
	s, now := c.Balancer.Standing(ep, poll.Nanotime()), time.Now().UTC().Truncate(time.Millisecond)
	out = api.Standing{Open: s.Open, Full: s.Full}
	if s.Share < 1 {
		out.Share = s.Share
	}
	if s.Ejected {
		out.Ejected = &api.Ejected{Since: now.Add(-s.For), Until: now.Add(s.Left), Tried: s.Trying, Why: "failed attempts"}
		if s.Resets {
			out.Ejected.Why = "resets"
		}
	}
	return out
}

// Annotations returns those of a port's Service that have an effect, by their whole names.
func Annotations(port *service.Port) map[string]string {
	var all map[string]string
	for name, value := range port.Annotations {
		if all == nil {
			all = make(map[string]string)
		}
		if !strings.Contains(name, "/") {
			name = "sluice.dev/" + name
		}
		all[name] = value
	}
	return all
}
