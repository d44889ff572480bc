package tproxy

import "github.com/sluice-proxy/sluice/redirect"

// omitted says which rules are left out because nothing needs them: every packet
// of the node pays for each rule. It depends on the plan and on what others do, so
// that the table is filled anew when that changes.
type omitted struct {
	tracking bool // nothing is tracked
	replies  bool // no socket of ours has a client's address
	foreign  bool // all addresses are ours
	shield   bool // the program that finds listeners outlives the process
}

// omittedFor returns what a plan does not need. Without a BPF program that finds the
// sockets, every rule counts.
func (f *filter) omittedFor(p *redirect.Plan) omitted {
	if !f.numbers.lookup {
		return omitted{}
	}
	return omitted{
		tracking: !f.tracked,
		replies:  p.NodeSourceOnly,
		foreign:  p.NonLocal.Len() == 0 && p.Lingering.Len() == 0,
		shield:   f.outlived,
	}
}

// output reports whether no packet that this node sends has to be seen.
func (o omitted) output() bool { return o.tracking && o.foreign }

// data reports whether TCP packets count only if they open a connection.
func (o omitted) data() bool { return o.tracking && o.replies && o.foreign }

// input reports whether no packet that comes in has to be seen.
func (o omitted) input() bool { return o.data() && o.shield }
