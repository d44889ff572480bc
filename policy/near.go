package policy

import "github.com/sluice-proxy/sluice/service"

// Place is where a client is: on a node, whose name, zone and labels may be unknown.
type Place struct {
	Node, Zone string
	Labels     map[string]string
	Nodes      *service.Nodes // for topology keys; may be nil
}

// Near returns the ready endpoints that a client at the place may use: by topology keys, or
// without any by the endpoints' hints (A2.8 to A2.10). It is for clients that get addresses
// of endpoints, as of headless Services, in place of connections. The result keeps the
// order and may be the list itself.
func (p *Place) Near(endpoints []service.Endpoint, keys []string) []service.Endpoint {
	n := &node{name: p.Node, zone: p.Zone, labels: p.Labels, others: p.Nodes}
	ready := filter(endpoints, func(e *service.Endpoint) bool { return e.Ready })
	if len(keys) > 0 {
		return keyedEndpoints(ready, keys, n)
	}
	return clusterEndpoints(ready, n)
}
