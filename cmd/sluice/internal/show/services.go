package show

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// Services writes a table of service ports.
func Services(out io.Writer, all []api.Service) error {
	return table(out, []string{"SERVICE", "PROTOCOL", "TYPE", "PORT", "NODE PORT", "ADDRESSES", "READY", "OPEN", "WAITING", "OPENED", "FAILED"}, all, func(s *api.Service) []string {
		ready, failed := 0, uint64(0)
		for _, e := range s.Endpoints {
			if e.Ready {
				ready++
			}
		}
		for _, n := range s.Totals.FailedAttempts {
			failed += n
		}
		nodePort := ""
		if s.NodePort != 0 {
			nodePort = strconv.Itoa(int(s.NodePort))
		}
		var addresses []string
		for _, a := range s.VIPs {
			addresses = append(addresses, printable.Name(a))
		}
		return []string{dash(s.Service), dash(s.Protocol), dash(s.Type), strconv.Itoa(int(s.Port)), dash(nodePort), cmp.Or(strings.Join(addresses, ","), "-"),
			fmt.Sprintf("%d/%d", ready, len(s.Endpoints)), strconv.FormatInt(s.Totals.Open, 10), strconv.Itoa(s.Held + s.Queued),
			strconv.FormatUint(s.Totals.Opened, 10), strconv.FormatUint(failed, 10)}
	})
}

// Endpoint is an endpoint of a service port; the Endpoint in it is empty where the port
// has none.
type Endpoint struct {
	Service  string `json:"service"`
	Protocol string `json:"protocol"`
	api.Endpoint
}

// Endpoints writes a table of endpoints.
func Endpoints(out io.Writer, all []Endpoint) error {
	return table(out, []string{"SERVICE", "PROTOCOL", "ENDPOINT", "STATE", "POD", "NODE", "ZONE"}, all, func(e *Endpoint) []string {
		return []string{dash(e.Service), dash(e.Protocol), dash(e.Endpoint.Endpoint), state(&e.Endpoint), dash(e.Pod), dash(e.Node), dash(e.Zone)}
	})
}

// state names the conditions of an endpoint, and what keeps connections off it.
func state(e *api.Endpoint) string {
	words := e.Words()
	switch {
	case e.Endpoint == "":
		return "no endpoint"
	case e.Ready && words != "":
		return "ready, " + words
	case e.Ready:
		return "ready"
	case e.Terminating && e.Serving:
		return "terminating"
	case e.Terminating:
		return "terminating, not serving"
	}
	return "not ready"
}
