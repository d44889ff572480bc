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
	takenPorts        = "cluster IP ports that a program of the node listens to on all addresses" // F4
	datagrams         = "UDP"
	pastTracking      = "connections past connection tracking"
)

// networks are what a mode steers.
func (m mode) networks() []string {
	if m.lacks(datagrams) {
		return []string{"tcp"}
	}
	return []string{"tcp", "udp"}
}

// kinds are all kinds of destinations.
var kinds = []string{clusterIP, foreignExternalIP, ownExternalIP, loadBalancerIP, proxiedIP, nodePort, otherNodePort, loopbackPort}

// mode is a way of steering that the tests are run over.
type mode struct {
	name   string
	flags  []string
	cannot []string   // what it lacks; docs/operations.md names it too
	flush  [][]string // what somebody could run that takes something of ours away
}

func (m mode) lacks(what string) bool { return slices.Contains(m.cannot, what) }

// flushRoutes take away routes and policy rules of ours.
var flushRoutes = [][]string{
	{"ip", "-4", "route", "flush", "table", "local", "proto", "83"},
	{"ip", "-6", "route", "flush", "table", "local", "proto", "83"},
	{"ip", "-4", "route", "flush", "table", "8376"},
	{"ip", "-6", "route", "flush", "table", "8376"},
	{"ip", "-4", "route", "flush", "table", "8377"},
	{"ip", "-6", "route", "flush", "table", "8377"},
	{"ip", "-4", "rule", "flush", "protocol", "83"},
	{"ip", "-6", "rule", "flush", "protocol", "83"},
}

// modes are all of them, the default first.
var modes = []mode{
	{name: "tproxy/nftables", flags: []string{"--redirect", "tproxy"},
		cannot: []string{foreignExternalIP, ownExternalIP, loadBalancerIP, nodePort, otherNodePort, loopbackPort, clientAddresses, datagrams, pastTracking},
		flush:  slices.Concat([][]string{{"nft", "flush", "ruleset"}}, flushRoutes)},
}

// forModes runs a test over all modes.
func forModes(t *testing.T, test func(*testing.T, mode)) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) { test(t, m) })
	}
}
