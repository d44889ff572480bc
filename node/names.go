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

// names are the DNS server, and the names that it knows. run's goroutine owns both.
type names struct {
	server  *dns.Server // nil until the sockets are open
	catalog *dns.Catalog
	publish func() // the names that were published last
}

func newNames() *names { return &names{catalog: dns.NewCatalog(), publish: func() {}} }

// openDNS opens the sockets of the DNS server.
func (p *Proxy) openDNS() error {
	if p.names == nil {
		return nil
	}
	o := &p.config.DNS
	server, err := dns.Listen(dns.Options{Addresses: o.Addresses, Zone: o.Zone, Forward: o.Forward})
	if err != nil {
		return fmt.Errorf("--dns: %w", err)
	}
	p.names.server = server
	p.names.publish()
	return nil
}

// serve answers until ctx ends.
func (n *names) serve(ctx context.Context) error {
	n.server.Serve(ctx)
	return nil
}

// close closes the sockets. n may be nil.
func (n *names) close() {
	if n != nil && n.server != nil {
		n.server.Close()
	}
}

// stats are zero until the sockets are open.
func (n *names) stats() dns.Stats {
	if n.server == nil {
		return dns.Stats{}
	}
	return n.server.Stats()
}

// apply applies a change to the names. They are answered after publish. n may be nil.
func (n *names) apply(c service.Change) (publish func(*service.Snapshot)) {
	if n == nil {
		return func(*service.Snapshot) {}
	}
	next := n.catalog.Apply(c)
	return func(snap *service.Snapshot) {
		n.publish = func() {
			if n.server != nil {
				n.server.Set(next, snap.Nodes, snap.Node)
			}
		}
		n.publish()
	}
}
