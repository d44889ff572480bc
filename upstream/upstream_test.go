package upstream

import (
	"net/netip"
	"testing"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// rules returns those of a steering mode that brings replies back and passes
// connection tracking. change may alter them.
func rules(change func(*Rules)) *Rules {
	r := New(redirect.Traits{Replies: redirect.Replies{Diverted: true, Untracked: true, Mark: 0x100}, PastMark: 0x200}, nil, zerolog.Nop())
	if change != nil {
		change(r)
		return New(redirect.Traits{Replies: r.replies, PastMark: r.pastMark}, r.sameLink, zerolog.Nop())
	}
	return r
}

// TestChoose: whose address an endpoint sees, and how the socket is made.
func TestChoose(t *testing.T) {
	addr := netip.MustParseAddr
	own := hostnet.NewAddresses([]netip.Addr{addr("10.1.0.1")})
	in := service.Endpoint{Addr: netip.MustParseAddrPort("10.2.1.2:80"), Place: service.At("other", "")}
	out := service.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.7:80")}
	returns := out
	returns.MayReturn = true
	local := service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.1:80")}
	clash := local
	clash.Addr = netip.AddrPortFrom(local.Addr.Addr(), rules(nil).kernel.First)
	const node, client = policy.SourceNode, policy.SourceClient
	for _, c := range []struct {
		what    string
		change  func(*Rules)
		wants   policy.Source
		client  string
		ep      service.Endpoint
		source  policy.Source
		kind    Kind
		mark    uint32
		isBound bool
	}{
		{"A3.8 the node's", nil, node, "10.1.0.2", in, node, Untracked, 0x100, false},
		{"A3.8 outside of the cluster", nil, node, "10.1.0.2", out, node, FromNode, 0, false},
		{"no way past tracking", func(r *Rules) { r.replies.Untracked = false }, node, "10.1.0.2", in, node, FromNode, 0, false},
		{"nothing is tracked", func(r *Rules) { r.replies.Tracking = redirect.NewTracking(0, redirect.Automatic, nil) }, node, "10.1.0.2", in, node, FromNode, 0, false},
		{"a Service's address", nil, node, "10.1.0.2", returns, node, Untracked, 0x100, false},
		{"a Service's address, nothing is tracked", func(r *Rules) { r.replies.Tracking = redirect.NewTracking(0, redirect.Automatic, nil) }, node, "10.1.0.2", returns, node, Untracked, 0x100, false},
		{"a Service's address, no way past tracking", func(r *Rules) { r.replies.Untracked = false }, node, "10.1.0.2", returns, node, FromNode, 0x200, false},
		{"the node's own endpoint", nil, node, "10.1.0.2", local, node, FromNode, 0, false},
		{"the node's own endpoint on a port of the kernel's", nil, node, "10.1.0.2", clash, node, ToOwn, 0, true},
		{"A3.9 the client's", nil, client, "10.1.0.2", in, client, FromClient, 0, true},
		{"A3.9 to a Service's address", nil, client, "10.1.0.2", returns, client, FromClient, 0x200, true},
		{"A3.8 hairpin", nil, client, "10.2.1.2", in, node, Untracked, 0x100, false},
		{"the node is the client", nil, client, "10.1.0.1", in, client, FromOwnClient, 0, true},
		{"the node is the client of a Service's address", nil, client, "10.1.0.1", returns, client, Untracked, 0x100, false},
		{"F7 replies do not come back", func(r *Rules) { r.replies.Diverted = false }, client, "10.1.0.2", in, node, Untracked, 0x100, false},
		{"F7 an endpoint of the node's own", nil, client, "10.1.0.2", local, node, FromNode, 0, false},
		{"F7 a link-local client", nil, client, "169.254.0.9", in, node, Untracked, 0x100, false},
		{"F7 on one link", func(r *Rules) { r.sameLink = func(_, _ netip.Addr) bool { return true } }, client, "10.2.1.9", in, node, Untracked, 0x100, false},
	} {
		got := rules(c.change).Choose(own, &policy.Verdict{Source: c.wants}, addr(c.client), &c.ep)
		if want := (Choice{c.source, c.kind, c.mark, c.ep.MayReturn}); got != want || got.IsBound() != c.isBound {
			t.Errorf("%s: %+v, bound %t; want %+v, %t", c.what, got, got.IsBound(), want, c.isBound)
		}
	}
}
