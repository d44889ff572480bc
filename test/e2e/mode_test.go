package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// What a steering mode may lack: kinds of destinations, and more.
const (
	clusterIP          = "cluster IP"
	nonLocalExternalIP = "non-local external IP"
	ownExternalIP      = "own external IP"
	loadBalancerIP     = "load balancer IP"
	proxiedIP          = "proxied load balancer IP"
	nodePort           = "node port"
	otherNodePort      = "node port on another address"
	loopbackPort       = "node port on loopback"
	clientAddresses    = "client addresses"
	datagrams          = "UDP"
	takenPorts         = "cluster IP ports that a program of the node listens to on all addresses" // F4
	lateRefusals       = "refusals while a killed proxy is not back"
	shieldAfterKill    = "refusals where the host's servers listen on all addresses, while a killed proxy is not back" // F4
	fragments          = "datagrams in fragments, to non-local addresses and back to clients' own"
	ownFragments       = "datagrams of the node itself over IPv6 that do not fit a packet of lo"
	nonLocalRefusals   = "refusals at non-local IPv4 addresses"
	untracked          = "connections past connection tracking"
)

// mode is a steering mode in which the tests run.
type mode struct {
	name     string
	flags    []string
	programs string     // the node's variant of iptables
	cannot   []string   // what it lacks; docs/steering.md lists it too
	flush    [][]string // commands by which another program removes some of our state
}

// flushRoutes remove our routes and policy rules.
var flushRoutes = [][]string{
	{"ip", "-4", "route", "flush", "table", "local", "proto", "83"},
	{"ip", "-6", "route", "flush", "table", "local", "proto", "83"},
	{"ip", "-4", "route", "flush", "table", "8376"},
	{"ip", "-6", "route", "flush", "table", "8376"},
	{"ip", "-4", "route", "flush", "table", "8377"},
	{"ip", "-6", "route", "flush", "table", "8377"},
	{"ip", "-4", "route", "flush", "table", "8378"},
	{"ip", "-6", "route", "flush", "table", "8378"},
	{"ip", "-4", "rule", "flush", "protocol", "83"},
	{"ip", "-6", "rule", "flush", "protocol", "83"},
}

// modes are all modes, the default first.
var modes = []mode{
	{
		name: "sklookup-nftables", flags: []string{"--redirect", "sklookup+nftables"},
		cannot: []string{ownFragments},
		flush:  slices.Concat([][]string{{"nft", "flush", "ruleset"}}, flushRoutes),
	},
	{
		name: "tproxy-nftables", flags: []string{"--redirect", "tproxy", "--tproxy-backend", "nftables"},
		cannot: []string{ownFragments},
		flush:  slices.Concat([][]string{{"nft", "flush", "ruleset"}}, flushRoutes),
	},
	{
		name: "tproxy-iptables-nft", flags: []string{"--redirect", "tproxy", "--tproxy-backend", "iptables"}, programs: "nft",
		cannot: []string{lateRefusals, ownFragments},
		flush:  slices.Concat([][]string{{"nft", "flush", "ruleset"}, {"iptables-nft", "-t", "mangle", "-F"}, {"ip6tables-nft", "-t", "mangle", "-F"}}, flushRoutes),
	},
	{
		name: "tproxy-iptables-legacy", flags: []string{"--redirect", "tproxy", "--tproxy-backend", "iptables"}, programs: "legacy",
		cannot: []string{lateRefusals, ownFragments},
		flush:  slices.Concat([][]string{{"iptables-legacy", "-t", "mangle", "-F"}, {"ip6tables-legacy", "-t", "mangle", "-F"}}, flushRoutes),
	},
	{
		name: "sklookup", flags: []string{"--redirect", "sklookup"},
		cannot: []string{fragments, nonLocalRefusals, untracked},
		flush:  flushRoutes,
	},
	{
		name: "bind", flags: []string{"--redirect", "bind"},
		cannot: []string{fragments, nonLocalRefusals, takenPorts, untracked, shieldAfterKill},
		flush:  flushRoutes,
	},
}

func (m mode) lacks(what string) bool { return slices.Contains(m.cannot, what) }

// networks are the networks that a mode steers.
func (m mode) networks() []string {
	if m.lacks(datagrams) {
		return []string{"tcp"}
	}
	return []string{"tcp", "udp"}
}

// environment is that of a node whose iptables is of the mode's variant; nil if it
// does not matter.
func (m mode) environment(t *testing.T) []string {
	t.Helper()
	if m.programs == "" {
		return nil
	}
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			target, err := filepath.EvalSymlinks(administration(t, family+"-"+m.programs+suffix))
			if err == nil {
				err = os.Symlink(target, filepath.Join(dir, family+suffix))
			}
			must.OK(t, err)
		}
	}
	environment := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "PATH=") })
	return append(environment, "PATH="+dir+":"+os.Getenv("PATH"))
}

// kinds are all kinds of destinations.
var kinds = []string{clusterIP, nonLocalExternalIP, ownExternalIP, loadBalancerIP, proxiedIP, nodePort, otherNodePort, loopbackPort}

// forModes runs a test in all modes in parallel. Such tests mostly wait, and none
// measures time.
func forModes(t *testing.T, test func(*testing.T, mode)) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			test(t, m)
		})
	}
}
