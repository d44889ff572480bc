package service

import "unique"

// Place is where an endpoint runs. A cluster's endpoints have few places between them, and each
// holds a pointer to its own. The zero value is unknown.
type Place struct{ in unique.Handle[place] }

type place struct{ node, zone string }

// At returns a place. Either name may be empty.
func At(node, zone string) Place {
	if node == "" && zone == "" {
		return Place{}
	}
	return Place{unique.Make(place{node, zone})}
}

// Node is the name of the node, or "".
func (p Place) Node() string { return p.names().node }

// Zone is the name of the zone, or "".
func (p Place) Zone() string { return p.names().zone }

func (p Place) names() (known place) {
	if p != (Place{}) {
		known = p.in.Value()
	}
	return known
}
