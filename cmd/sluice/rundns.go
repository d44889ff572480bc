package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/dns"
	"github.com/sluice-proxy/sluice/node"
)

// dnsOptions are the flags of the DNS server.
type dnsOptions struct {
	addresses, forward endpointList
	zone               string
}

func (o *dnsOptions) register(f *pflag.FlagSet) {
	f.Var(&o.addresses, "dns", "addresses of this node for a DNS server for the names of Services; without a port: 53 (default: none)")
	f.StringVar(&o.zone, "dns-zone", "cluster.local", "domain of the cluster, below which --dns answers")
	f.Var(&o.forward, "dns-forward", "resolvers that --dns asks for all other names, one after the other; without a port: 53 (default: none, other names are refused)")
}

func (o *dnsOptions) validate() error {
	if fault := dns.ZoneFault(o.zone); fault != "" {
		return fmt.Errorf("--dns-zone: %q %s", o.zone, fault)
	}
	for _, a := range o.addresses {
		if a.Addr().IsUnspecified() {
			return fmt.Errorf("--dns: %s stands for all addresses: name those that answer, as replies over UDP have to leave from them", a.Addr())
		}
	}
	if len(o.forward) > 0 && len(o.addresses) == 0 {
		return errors.New("--dns-forward belongs to --dns")
	}
	for _, a := range o.forward {
		if slices.Contains(o.addresses, a) {
			return fmt.Errorf("--dns-forward: %s is --dns itself", a)
		}
	}
	return nil
}

func (o *dnsOptions) config() node.DNS {
	return node.DNS{Addresses: o.addresses, Zone: o.zone, Forward: o.forward}
}

// endpointList is a flag that takes IP addresses with or without a port, separated by
// commas or repeated.
type endpointList []netip.AddrPort

func (e *endpointList) Type() string   { return "IP[:PORT],..." }
func (e *endpointList) String() string { return joined(*e) }

func (e *endpointList) Set(s string) error {
	list, err := parsed(s, func(part string) (netip.AddrPort, error) {
		if a, err := netip.ParseAddr(part); err == nil {
			return netip.AddrPortFrom(a.Unmap(), 53), nil
		}
		a, err := netip.ParseAddrPort(part)
		if err != nil {
			return a, fmt.Errorf("%q is not an IP address such as 127.0.0.53, with a port or without", part)
		}
		return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
	})
	*e = append(*e, list...)
	return err
}
