package policy

import (
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// mode is the topology mode that the hints allow (A2.8 to A2.10). The Service's
// own fields and annotations have no influence (A2.11).
type mode uint8

const (
	anywhere mode = iota
	sameNode
	sameZone
)

// externallyAccessible implements A2.1 for one family.
func externallyAccessible(p *service.Port, v *service.FamilyView) bool {
	return p.NodePort != 0 || len(v.LoadBalancerIPs) > 0 || len(v.ExternalIPs) > 0
}

// categorize selects the endpoints of each traffic policy (A2.3 to A2.10).
func categorize(p *service.Port, v *service.FamilyView, n *node) family {
	out := family{exists: true}
	endpoints := n.withDrains(v.Endpoints)
	external := externallyAccessible(p, v)
	if !p.InternalLocal || external { // A2.3
		if len(p.TopologyKeys) > 0 {
			out.cluster = keyedEndpoints(endpoints, p.TopologyKeys, n)
		} else {
			out.cluster = clusterEndpoints(endpoints, n)
		}
	}
	if p.InternalLocal || p.ExternalLocal && external { // A2.3
		out.local = readyOrDraining(endpoints, func(e *service.Endpoint) bool { return e.Local }) // A2.5
	}
	out.usable = slices.ContainsFunc(endpoints, func(e service.Endpoint) bool {
		return e.Ready || draining(&e) // A2.6
	})
	return out
}

// clusterEndpoints returns the ready endpoints that fit the topology. If none is
// ready, it returns the terminating ones that still serve (A2.4).
func clusterEndpoints(all []service.Endpoint, n *node) []service.Endpoint {
	m := topologyMode(all, n)
	usable := filter(all, func(e *service.Endpoint) bool { return e.Ready && fits(e, m, n) })
	if len(usable) > 0 {
		return usable
	}
	return filter(all, draining)
}

// anyTopology is the topology key that every endpoint matches.
const anyTopology = "*"

// keyedEndpoints tries the keys in order and returns the endpoints whose node has
// the same label value as this node, for the first key with any match. Without a
// match it returns none: keys without "*" are a restriction, not a preference. Keys
// replace hints and also restrict terminating endpoints (A2.4).
func keyedEndpoints(all []service.Endpoint, keys []string, n *node) []service.Endpoint {
	usable := readyOrDraining(all, func(*service.Endpoint) bool { return true })
	for _, key := range keys {
		if key == anyTopology {
			return usable
		}
		ours, ok := n.labels[key]
		if !ok {
			continue
		}
		near := filter(usable, func(e *service.Endpoint) bool {
			its := n.others.Get(e.Node())
			if its == nil {
				return false
			}
			value, ok := its.Labels[key]
			return ok && value == ours
		})
		if len(near) > 0 {
			return near
		}
	}
	return nil
}

// readyOrDraining returns the ready endpoints of some. If there are none, it returns the
// terminating ones of them that still serve.
func readyOrDraining(all []service.Endpoint, is func(*service.Endpoint) bool) []service.Endpoint {
	ready := filter(all, func(e *service.Endpoint) bool { return is(e) && e.Ready })
	if len(ready) > 0 {
		return ready
	}
	return filter(all, func(e *service.Endpoint) bool { return is(e) && draining(e) })
}

// draining reports whether an endpoint is Serving and Terminating. An endpoint that
// is neither ready nor draining is never used (A2.7).
func draining(e *service.Endpoint) bool { return e.Serving && e.Terminating }

// topologyMode returns the narrowest mode that the hints allow. A ready endpoint
// without a hint disables that kind of hint (A2.10).
func topologyMode(all []service.Endpoint, n *node) mode {
	nodeHints, zoneHints := true, true
	thisNode, thisZone := false, false
	for i := range all {
		e := &all[i]
		if !e.Ready {
			continue
		}
		nodeHints = nodeHints && len(e.NodeHints()) > 0
		zoneHints = zoneHints && len(e.ZoneHints()) > 0
		thisNode = thisNode || hints(e.NodeHints(), n.name)
		thisZone = thisZone || hints(e.ZoneHints(), n.zone)
	}
	switch {
	case nodeHints && thisNode:
		return sameNode // A2.8
	case zoneHints && thisZone:
		return sameZone // A2.9
	}
	return anywhere // A2.10
}

func fits(e *service.Endpoint, m mode, n *node) bool {
	switch m {
	case sameNode:
		return hints(e.NodeHints(), n.name)
	case sameZone:
		return hints(e.ZoneHints(), n.zone)
	}
	return true
}

// hints reports whether a list of hints contains this node's name or zone. An
// unknown name or zone never matches (A2.10).
func hints(list []string, us string) bool { return us != "" && slices.Contains(list, us) }

// filter returns the endpoints for which keep is true, in order. If that is all of
// them, it returns the list itself.
func filter(all []service.Endpoint, keep func(*service.Endpoint) bool) []service.Endpoint {
	count := 0
	for i := range all {
		if keep(&all[i]) {
			count++
		}
	}
	if count == len(all) {
		return all
	}
	if count == 0 {
		return nil
	}
	out := make([]service.Endpoint, 0, count)
	for i := range all {
		if keep(&all[i]) {
			out = append(out, all[i])
		}
	}
	return out
}
