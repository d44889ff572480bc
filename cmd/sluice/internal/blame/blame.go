// Package blame sums up failures by who caused them and why. It does no I/O.
package blame

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
)

// Failures are those of one endpoint of a Service port for one reason, or the refusals of a
// Service port, or of an address that no Service has.
type Failures struct {
	Count    int       `json:"count"`
	First    time.Time `json:"first"`
	Last     time.Time `json:"last"`
	Service  string    `json:"service,omitempty"`
	VIP      string    `json:"vip,omitempty"`
	Endpoint string    `json:"endpoint,omitempty"`
	Pod      string    `json:"pod,omitempty"`
	Node     string    `json:"node,omitempty"`
	Error    string    `json:"error"`
	// ProxyNode is the node of the proxy that met them, if several were asked.
	ProxyNode string `json:"proxy_node,omitempty"`
	Packets   uint64 `json:"packets,omitempty"` // that were refused or dropped
	// Clients is how many addresses met them. LastClient and LastID are of the last
	// connection that did.
	Clients    int    `json:"clients"`
	LastClient string `json:"last_client"`
	LastID     uint64 `json:"last_id"`
}

// Sum sums up failures, which come newest first. Most failures come first, among equally
// many the newest.
func Sum(all []api.Failure) []Failures {
	type key struct{ service, vip, endpoint, pod, node, error, proxy string }
	at := make(map[key]int) // in sums
	clients := make(map[key]map[string]struct{})
	var sums []Failures
	for i := range all {
		f := &all[i]
		k := key{f.Service, f.VIP, f.Endpoint, f.Pod, f.Node, f.Error, f.ProxyNode}
		n, known := at[k]
		if !known {
			n = len(sums)
			at[k], clients[k] = n, make(map[string]struct{})
			sums = append(sums, Failures{
				Last: f.Time, Service: f.Service, VIP: f.VIP, Endpoint: f.Endpoint, Pod: f.Pod, Node: f.Node, Error: f.Error,
				ProxyNode: f.ProxyNode, LastClient: f.Client, LastID: f.ID,
			})
		}
		clients[k][address(f.Client)] = struct{}{}
		s := &sums[n]
		s.Count, s.First, s.Clients, s.Packets = s.Count+1, f.Time, len(clients[k]), s.Packets+f.Packets
	}
	slices.SortStableFunc(sums, func(a, b Failures) int { return Compare(&a, &b) })
	return sums
}

// Compare sorts most failures first, among equally many the newest.
func Compare(a, b *Failures) int {
	return cmp.Or(cmp.Compare(b.Count, a.Count), b.Last.Compare(a.Last))
}

// address returns a client's address without its port.
func address(client string) string {
	if a, err := netip.ParseAddrPort(client); err == nil {
		return a.Addr().String()
	}
	return client
}
