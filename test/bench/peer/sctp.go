package peer

import "github.com/sluice-proxy/sluice/test/bench/load"

// SCTP lists the peers of the SCTP columns, in the order of the table.
func SCTP(builds Builds) []Peer {
	peers := []Peer{
		{Name: "direct", About: "routed, no proxy", start: startDirect},
		{Name: "dnat", About: "kernel DNAT by iptables", Package: "iptables", program: "iptables-legacy", version: []string{"--version"}, start: startSCTPDNAT},
		{Name: "ipvs", About: "kernel IPVS, as kube-proxy's mode ipvs", Package: "ipvsadm", program: "ipvsadm", version: []string{"--version"}, start: startIPVS},
		sluice(builds.Sluice, "sluice", "the whole product, access log on"),
		{Name: "least", About: "the least SCTP relay: receives a message, sends it", Extra: true, Columns: []string{"sctp-bulk", "sctp-bulk-wide", "sctp-rr16k"}, start: startLeastRelay},
	}
	if builds.Base != "" {
		base := sluice(builds.Base, "sluice-base", "another build")
		base.Variant = true
		peers = append(peers, base)
	}
	return peers
}

func startSCTPDNAT(s *Site) (*Running, error) {
	if err := s.World.TranslateSCTP(); err != nil {
		return nil, err
	}
	return s.running(nil), nil
}

func startIPVS(s *Site) (*Running, error) {
	if err := s.World.BalanceSCTP(load.SCTPPorts); err != nil {
		return nil, err
	}
	return s.running(nil), nil
}
