// Package dns is what the binary would have without a DNS server: BenchmarkBinary builds it
// in place of the real one.
package dns

import (
	"context"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

type (
	Options struct {
		Addresses []netip.AddrPort
		Zone      string
		Forward   []netip.AddrPort
	}
	Stats   struct{ Answered, Missing, Forwarded, Refused, Failed uint64 }
	Server  struct{}
	Catalog struct{}
	Names   struct{}
)

func NewCatalog() *Catalog                               { return nil }
func (*Catalog) Apply(service.Change) *Names             { return nil }
func ZoneFault(string) string                            { return "" }
func Listen(Options) (*Server, error)                    { return nil, nil }
func (*Server) Set(*Names, *service.Nodes, service.Node) {}
func (*Server) Stats() Stats                             { return Stats{} }
func (*Server) Serve(context.Context)                    {}
func (*Server) Close()                                   {}
