package iptables

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// version is the Internet Protocol's.
type version uint8

const (
	v4 version = iota
	v6
	versions
)

func versionOf(a netip.Addr) version {
	if a.Is4() {
		return v4
	}
	return v6
}

// families are what rules and sets of one address family differ by.
var families = [versions]struct {
	digit   string
	ipset   string // its name in ipset
	program string // the prefix of its programs' names
	listen  netip.Addr
}{
	{"4", "inet", "iptables", redirect.ListenIPv4},
	{"6", "inet6", "ip6tables", redirect.ListenIPv6},
}

// list is one of the lists of addresses that rules ask for. With ipset each is
// a set, without it each of its elements is a rule.
type list string

const (
	listLocal   list = "local"   // ranges that are delivered locally
	listCluster list = "cluster" // addresses whose other ports refuse
	listRefuse  list = "refuse"  // destinations, as are those that follow
	listSilent  list = "silent"
	listForeign list = "foreign" // steered, refused or silent on addresses that are not ours
	listLinger  list = "linger"  // established connections of these go on
	listOwn     list = "own"     // on the node's own addresses
)

// lane is a listener that destinations are steered to.
type lane struct {
	protocol service.Protocol // TCP or UDP
	port     uint16
}

// list gives the list of the lane's destinations.
func (l lane) list() list { return list(fmt.Sprintf("%s-%d", protocolName(l.protocol), l.port)) }

// element is a range, an address, or a destination.
type element struct {
	prefix   netip.Prefix
	port     uint16           // 0 if it is not a destination
	protocol service.Protocol // likewise
}

func address(a netip.Addr) element { return element{prefix: netip.PrefixFrom(a, a.BitLen())} }

func destination(d service.Destination) element {
	return element{netip.PrefixFrom(d.Addr, d.Addr.BitLen()), d.Port, d.Protocol}
}

// text says an element as ipset does: "10.96.0.0/16", "10.96.0.10",
// "10.96.0.10,tcp:80".
func (e element) text() string {
	text := e.prefix.String()
	if e.prefix.IsSingleIP() {
		text = e.prefix.Addr().String()
	}
	if e.port != 0 {
		text += fmt.Sprintf(",%s:%d", protocolName(e.protocol), e.port)
	}
	return text
}

// match is what a rule asks for an element without ipset.
func (e element) match(d direction) string {
	text := "-d " + e.prefix.String()
	if d == src {
		text = "-s " + e.prefix.String()
	}
	if e.port != 0 {
		text += fmt.Sprintf(" -p %s --%cport %d", protocolName(e.protocol), d[0], e.port)
	}
	return text
}

func compareElements(a, b element) int {
	return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()),
		cmp.Compare(a.port, b.port), cmp.Compare(a.protocol, b.protocol))
}

func protocolName(p service.Protocol) string { return strings.ToLower(p.String()) }

type elements map[element]struct{}

func (e elements) sorted() []element {
	all := make([]element, 0, len(e))
	for x := range e {
		all = append(all, x)
	}
	slices.SortFunc(all, compareElements)
	return all
}

// contents are a plan's lists.
type contents struct {
	lists [versions]map[list]elements
	lanes [versions][]lane // in order
	// replies says that answers to clients' addresses are to be brought back.
	replies bool
}

func contentsOf(p *redirect.Plan) *contents {
	c := &contents{replies: !p.NodeSourceOnly}
	for v := range versions {
		c.lists[v] = map[list]elements{listLocal: {}, listCluster: {}, listRefuse: {}, listSilent: {}}
	}
	for l := range p.Local.Keys() {
		c.add(listLocal, element{prefix: l})
	}
	for a := range p.ClusterIPs.Keys() {
		c.add(listCluster, address(a))
	}
	for d, t := range p.Steer.All() {
		l := lane{d.Protocol, t.Port}
		c.add(l.list(), destination(d))
		c.destination(p, d)
		if v := versionOf(d.Addr); !slices.Contains(c.lanes[v], l) {
			c.lanes[v] = append(c.lanes[v], l)
		}
	}
	for d := range p.Refuse.Keys() {
		c.add(listRefuse, destination(d))
		c.destination(p, d)
	}
	for d := range p.Silent.Keys() {
		c.add(listSilent, destination(d))
		c.destination(p, d)
	}
	for d := range p.Lingering.Keys() {
		c.add(listLinger, destination(d))
	}
	for d := range p.Own.Keys() {
		c.add(listOwn, destination(d))
	}
	for _, lanes := range c.lanes {
		slices.SortFunc(lanes, func(a, b lane) int {
			return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.port, b.port))
		})
	}
	return c
}

// destination takes note of one that is on somebody else's address.
func (c *contents) destination(p *redirect.Plan, d service.Destination) {
	if p.Foreign.Has(d.Addr) {
		c.add(listForeign, destination(d))
	}
}

func (c *contents) add(l list, e element) {
	lists := c.lists[versionOf(e.prefix.Addr())]
	if lists[l] == nil {
		lists[l] = elements{}
	}
	lists[l][e] = struct{}{}
}
