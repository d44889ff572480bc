package node

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/dns"
	"github.com/sluice-proxy/sluice/service"
)

// DNS says how names of Services are answered.
type DNS struct {
	Addresses []netip.AddrPort // without any, there is no DNS server
	Zone      string           // of the cluster
	Forward   []netip.AddrPort // resolvers for other names
}

// names are the DNS server, and the names that it knows; run's goroutine has the catalog.
type names struct {
	server  *dns.Server
	catalog *dns.Catalog
}

// openDNS opens the sockets of the DNS server.
func (p *Proxy) openDNS() error {
	o := &p.config.DNS
	if len(o.Addresses) == 0 {
		return nil
	}
	server, err := dns.Listen(dns.Options{Addresses: o.Addresses, Zone: o.Zone, Forward: o.Forward})
	if err != nil {
		return fmt.Errorf("--dns: %w", err)
	}
	p.names = &names{server: server, catalog: dns.NewCatalog()}
	return nil
}

// serve answers until ctx ends.
func (n *names) serve(ctx context.Context) error {
	n.server.Serve(ctx)
	return nil
}

// apply applies a change to the names. They are answered after publish. n may be nil.
func (n *names) apply(c service.Change) (publish func(*service.Snapshot)) {
	if n == nil {
		return func(*service.Snapshot) {}
	}
	next := n.catalog.Apply(c)
	return func(snap *service.Snapshot) { n.server.Set(next, snap.Nodes, snap.Node) }
}
