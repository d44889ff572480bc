package node

import (
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// nodePatience is how long this node's object may be missing without a log line.
	nodePatience = 5 * time.Second
	// nodeReminder is the time between two lines about it.
	nodeReminder = time.Minute
)

// nodeDoubt logs that this node has no Node object, or none with podCIDRs where local
// pods are recognised by them (A4.6, A4.7, A7.3). Services are served all the same.
// Its methods are called from one goroutine.
type nodeDoubt struct {
	log      zerolog.Logger
	name     string
	needed   bool // a missing Node object is a fault even if there are no others
	podCIDRs bool // they are needed

	timer   *time.Timer // fires when it is time to log missing
	missing string      // "" while nothing is missing
	told    bool        // it is in the log
}

func newNodeDoubt(o *Config, log zerolog.Logger, cluster bool) *nodeDoubt {
	d := &nodeDoubt{log: log, name: o.Policy.NodeName, podCIDRs: o.Policy.DetectLocal == policy.DetectNodeCIDR, timer: time.NewTimer(nodePatience)}
	d.needed = cluster || o.HealthzAddress != "" || d.podCIDRs
	d.timer.Stop()
	return d
}

const (
	noNode = "no Node object has this node's name: /healthz answers 503, no endpoint counts as local, as a policy Local needs, and the node's address is the default route's; " +
		"Services are served otherwise. Set --hostname-override to a name that kubectl get nodes lists"
	noPodCIDRs = "this node's object has no podCIDRs, which --detect-local-mode NodeCIDR needs: no client counts as a pod of this node, so that endpoints of cluster IPs see every client's address, and pods get no exception from external policy Local; " +
		"Services are served otherwise. Have kube-controller-manager allocate them (--allocate-node-cidrs), or choose another mode"
)

// update takes a new snapshot.
func (d *nodeDoubt) update(s *service.Snapshot) {
	missing := ""
	switch {
	case !s.Node.Found && (d.needed || s.Nodes.Any()):
		missing = noNode
	case s.Node.Found && d.podCIDRs && len(s.Node.PodCIDRs) == 0:
		missing = noPodCIDRs
	}
	if missing == d.missing {
		return
	}
	d.missing = missing
	if missing != "" {
		d.timer.Reset(nodePatience)
		return
	}
	d.timer.Stop()
	if d.told {
		d.told = false
		d.log.Info().Str("node", d.name).Msg("this node's object is complete now")
	}
}

// remind logs what is missing, and sets the timer for a reminder.
func (d *nodeDoubt) remind() {
	if d.missing == "" {
		return
	}
	d.told = true
	d.log.Warn().Str("node", d.name).Msg(d.missing)
	d.timer.Reset(nodeReminder)
}
