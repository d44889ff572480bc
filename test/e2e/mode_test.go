package e2e

import (
	"slices"
	"testing"
)

// What a way of steering may lack: kinds of destinations, and more.
const (
	clusterIP         = "cluster IP"
	foreignExternalIP = "foreign external IP"
	ownExternalIP     = "own external IP"
	loadBalancerIP    = "load balancer IP"
	proxiedIP         = "proxied load balancer IP"
	nodePort          = "node port"
	otherNodePort     = "node port on another address"
	loopbackPort      = "node port on loopback"
	clientAddresses   = "client addresses"
)

// kinds are all kinds of destinations.
var kinds = []string{clusterIP, foreignExternalIP, ownExternalIP, loadBalancerIP, proxiedIP, nodePort, otherNodePort, loopbackPort}

// mode is a way of steering that the tests are run over.
type mode struct {
	name   string
	flags  []string
	cannot []string // what it lacks; docs/operations.md names it too
}

func (m mode) lacks(what string) bool { return slices.Contains(m.cannot, what) }

// modes are all of them, the default first.
var modes = []mode{
	{name: "tproxy/nftables", flags: []string{"--redirect", "tproxy"},
		cannot: []string{foreignExternalIP, ownExternalIP, loadBalancerIP, nodePort, otherNodePort, loopbackPort, clientAddresses}},
}

// forModes runs a test over all modes.
func forModes(t *testing.T, test func(*testing.T, mode)) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) { test(t, m) })
	}
}
