package service

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// parseNode returns a node and the problems of its object.
func parseNode(n *corev1.Node) (Node, []string) {
	out := Node{Name: n.Name, Labels: n.Labels, Found: true, BeingDeleted: isBeingDeleted(n)}
	var problems []string
	for _, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		if ip, ok := parseAddr(a.Address); ok {
			out.Addresses = addUnique(out.Addresses, ip)
		} else {
			problems = append(problems, fmt.Sprintf("InternalIP %q is not an IP address: left out (A1.7)", a.Address))
		}
	}
	texts := n.Spec.PodCIDRs
	if len(texts) == 0 && n.Spec.PodCIDR != "" {
		texts = []string{n.Spec.PodCIDR}
	}
	for _, text := range texts {
		if p, ok := parsePrefix(text); ok {
			out.PodCIDRs = addUnique(out.PodCIDRs, p)
		} else {
			problems = append(problems, fmt.Sprintf("podCIDR %q is not a CIDR: left out (A1.7)", text))
		}
	}
	return out, problems
}

// deletionTaint is the taint that the cluster autoscaler sets before it deletes a
// node.
const deletionTaint = "ToBeDeletedByClusterAutoscaler"

// isBeingDeleted implements A7.3.
func isBeingDeleted(n *corev1.Node) bool {
	return n.DeletionTimestamp != nil || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == deletionTaint })
}

func (n *Node) equal(o *Node) bool {
	return n.Name == o.Name && n.Found == o.Found && n.BeingDeleted == o.BeingDeleted && maps.Equal(n.Labels, o.Labels) &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs)
}

// nextNodes returns the nodes after a change, or the same pointer if nothing
// changed.
func nextNodes(last *Nodes, changed map[string]*Node) *Nodes {
	var next map[string]*Node
	for name, n := range changed {
		old := last.Get(name)
		if n == old || n != nil && old != nil && n.equal(old) {
			continue
		}
		if next == nil {
			next = make(map[string]*Node)
			if last != nil {
				maps.Copy(next, last.byName)
			}
		}
		if n == nil {
			delete(next, name)
		} else {
			next[name] = n
		}
	}
	if next == nil {
		return last
	}
	return &Nodes{byName: next}
}

func parseServiceCIDR(c *networkingv1.ServiceCIDR) ([]netip.Prefix, []string) {
	var out []netip.Prefix
	var problems []string
	for _, text := range c.Spec.CIDRs {
		p, ok := parsePrefix(text)
		if !ok {
			problems = append(problems, fmt.Sprintf("CIDR %q is not valid: left out (A1.7)", text))
		} else if err := CheckRange(p); err != nil {
			problems = append(problems, fmt.Sprintf("CIDR %s cannot be used, %v: left out (A1.7)", p, err))
		} else {
			out = addUnique(out, p)
		}
	}
	return out, problems
}

// joinServiceCIDRs returns all ranges, sorted and without duplicates.
func joinServiceCIDRs(byName map[string][]netip.Prefix) []netip.Prefix {
	var all []netip.Prefix
	for _, list := range byName {
		all = append(all, list...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}
