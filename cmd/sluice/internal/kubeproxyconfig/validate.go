package kubeproxyconfig

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Validate tells everything that is wrong with a configuration that has its
// defaults; the rules are kube-proxy's, but for those of modes that are not
// ours: what has no meaning here cannot be wrong either.
func Validate(c *Config) error {
	v := &validation{}
	v.check(slices.Contains([]string{"", "iptables", "ipvs", "nftables"}, string(c.Mode)), "mode",
		"%q is not one of iptables, ipvs, nftables; all of them mean the same here, as no rules are made for services (--redirect says how packets are steered)", c.Mode)
	v.positive("configSyncPeriod", c.ConfigSyncPeriod.Duration)
	if _, err := netip.ParseAddr(c.BindAddress); err != nil {
		v.add("bindAddress", "%q is not an IP address", c.BindAddress)
	}
	v.listenAddress("healthzBindAddress", c.HealthzBindAddress)
	v.listenAddress("metricsBindAddress", c.MetricsBindAddress)
	if o := c.OOMScoreAdj; o != nil {
		v.check(*o >= -1000 && *o <= 1000, "oomScoreAdj", "%d is not between -1000 and 1000", *o)
	}
	v.check(c.ClientConnection.Burst >= 0, "clientConnection.burst", "%d is negative", c.ClientConnection.Burst)
	v.periods("iptables", c.IPTables.SyncPeriod.Duration, c.IPTables.MinSyncPeriod.Duration)
	v.periods("nftables", c.NFTables.SyncPeriod.Duration, c.NFTables.MinSyncPeriod.Duration)
	if c.Mode == "ipvs" {
		v.periods("ipvs", c.IPVS.SyncPeriod.Duration, c.IPVS.MinSyncPeriod.Duration)
	}
	v.bit("iptables.masqueradeBit", c.IPTables.MasqueradeBit)
	v.bit("nftables.masqueradeBit", c.NFTables.MasqueradeBit)
	v.check(*c.Conntrack.MaxPerCore >= 0, "conntrack.maxPerCore", "%d is negative", *c.Conntrack.MaxPerCore)
	v.check(*c.Conntrack.Min >= 0, "conntrack.min", "%d is negative", *c.Conntrack.Min)
	v.notNegative("conntrack.tcpEstablishedTimeout", c.Conntrack.TCPEstablishedTimeout.Duration)
	v.notNegative("conntrack.tcpCloseWaitTimeout", c.Conntrack.TCPCloseWaitTimeout.Duration)
	v.notNegative("conntrack.udpTimeout", c.Conntrack.UDPTimeout.Duration)
	v.notNegative("conntrack.udpStreamTimeout", c.Conntrack.UDPStreamTimeout.Duration)
	v.detectLocal(c)
	v.nodePortAddresses(c.NodePortAddresses)
	return errors.Join(v.errors...)
}

type validation struct{ errors []error }

func (v *validation) add(field, format string, args ...any) {
	v.errors = append(v.errors, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
}

func (v *validation) check(ok bool, field, format string, args ...any) {
	if !ok {
		v.add(field, format, args...)
	}
}

func (v *validation) positive(field string, d time.Duration) {
	v.check(d > 0, field, "%s is not greater than 0", d)
}

func (v *validation) notNegative(field string, d time.Duration) {
	v.check(d >= 0, field, "%s is negative", d)
}

func (v *validation) periods(mode string, sync, least time.Duration) {
	v.positive(mode+".syncPeriod", sync)
	v.notNegative(mode+".minSyncPeriod", least)
	v.check(least <= sync, mode+".minSyncPeriod", "%s is greater than syncPeriod, %s", least, sync)
}

func (v *validation) bit(field string, bit *int32) {
	if bit != nil {
		v.check(*bit >= 0 && *bit <= 31, field, "%d is not between 0 and 31", *bit)
	}
}

func (v *validation) listenAddress(field, s string) {
	if err := CheckListenAddress(s); err != nil {
		v.add(field, "%v", err)
	}
}

// CheckListenAddress returns what is wrong with the address and port of a server.
func CheckListenAddress(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%q is not an address and a port such as 127.0.0.1:10249 or [::1]:10249", s)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return fmt.Errorf("%q: %s is not an IP address", s, host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%q: port %s is not between 1 and 65535", s, port)
	}
	return nil
}

// detectLocal checks how local pods are told, and the ranges of pods: one, or
// one of each family.
func (v *validation) detectLocal(c *Config) {
	switch c.DetectLocalMode {
	case "", "ClusterCIDR", "NodeCIDR":
	case "BridgeInterface":
		v.check(c.DetectLocal.BridgeInterface != "", "detectLocal.bridgeInterface", "it is empty, and detectLocalMode BridgeInterface needs it")
	case "InterfaceNamePrefix":
		v.check(c.DetectLocal.InterfaceNamePrefix != "", "detectLocal.interfaceNamePrefix", "it is empty, and detectLocalMode InterfaceNamePrefix needs it")
	default:
		v.add("detectLocalMode", "%q is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix", c.DetectLocalMode)
	}
	if c.ClusterCIDR == "" {
		return
	}
	families := map[bool]int{}
	for text := range strings.SplitSeq(c.ClusterCIDR, ",") {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			v.add("clusterCIDR", "%q is not a CIDR such as 10.244.0.0/16", text)
			return
		}
		families[p.Addr().Is4()]++
	}
	v.check(families[true] <= 1 && families[false] <= 1, "clusterCIDR", "%q holds more than one range of a family", c.ClusterCIDR)
}

func (v *validation) nodePortAddresses(list []string) {
	seen := map[string]bool{}
	for _, text := range list {
		switch text {
		case "primary", "localhost", "all":
			v.check(!seen[text], "nodePortAddresses", "%s is there twice", text)
			seen[text] = true
		default:
			if _, err := netip.ParsePrefix(text); err != nil {
				v.add("nodePortAddresses", "%q is neither a CIDR nor one of primary, localhost, all", text)
			}
		}
	}
}
