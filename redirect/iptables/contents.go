package iptables

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// version is the Internet Protocol's; it indexes families.
type version = service.Family

const v4, v6, versions = service.IPv4, service.IPv6, redirect.Families

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
	listNode    list = "node"    // the node's own addresses
)

// listener is a listener that destinations are steered to.
type listener struct {
	protocol service.Protocol // TCP or UDP
	port     uint16
}

// list returns the list of the listener's destinations.
func (l listener) list() list {
	return list(protocolName(l.protocol) + "-" + strconv.Itoa(int(l.port)))
}

// listener returns the listener whose destinations a list has, if it is such a list.
func (l list) listener() (listener, bool) {
	name, number, _ := strings.Cut(string(l), "-")
	port, err := strconv.ParseUint(number, 10, 16)
	return listener{protocolOf(name), uint16(port)}, err == nil
}

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
	return cmp.Or(a.prefix.Compare(b.prefix), cmp.Compare(a.port, b.port), cmp.Compare(a.protocol, b.protocol))
}

func protocolName(p service.Protocol) string { return strings.ToLower(p.String()) }

// protocolOf is protocolName backwards; 0 if it is none.
func protocolOf(name string) service.Protocol {
	for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
		if protocolName(p) == name {
			return p
		}
	}
	return 0
}

type elements map[element]struct{}

func (e elements) sorted() []element { return slices.SortedFunc(maps.Keys(e), compareElements) }

// contents are a plan's lists. Each list has rules. With ipset, only their names
// count.
type contents struct {
	lists [versions]map[list]elements
	sockets
}

// sockets are the sockets of ours that rules look for: those on clients' addresses,
// whose answers have to be brought back, and those on the node's own addresses that
// bypass connection tracking. If connections to endpoints are kept in connection tracking,
// the former do not bypass it either, and there are none of the latter.
type sockets struct{ replies, untracked, kept bool }

// fixed are the lists that always have rules, as they often become empty for a while.
var fixed = []list{listLocal, listCluster, listRefuse, listSilent}

func contentsOf(p *redirect.Plan) *contents {
	c := &contents{}
	for v := range versions {
		c.lists[v] = map[list]elements{}
		for _, l := range fixed {
			c.lists[v][l] = elements{}
		}
	}
	changes := redirect.Whole(p)
	for _, e := range editsOf(&changes, &redirect.Plan{}, p).add {
		lists := c.lists[e.version]
		if lists[e.list] == nil {
			lists[e.list] = elements{}
		}
		lists[e.list][e.element] = struct{}{}
	}
	return c
}

// has reports whether there are rules for a list.
func (c *contents) has(v version, l list) bool {
	_, is := c.lists[v][l]
	return is
}

// listeners returns the listeners of a family, in order.
func (c *contents) listeners(v version) (listeners []listener) {
	for l := range c.lists[v] {
		if listener, is := l.listener(); is {
			listeners = append(listeners, listener)
		}
	}
	slices.SortFunc(listeners, func(a, b listener) int {
		return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.port, b.port))
	})
	return listeners
}

// edits are what has to be done to lists.
type edits struct{ add, drop []edit }

// edit is about one element of one list.
type edit struct {
	version version
	list    list
	element element
}

// editsOf returns what the changes from one plan to another do to the lists. It does
// not handle [redirect.Changes.Rehomes].
func editsOf(c *redirect.Changes, from, to *redirect.Plan) (e edits) {
	for _, s := range c.Steer {
		after := listener{s.Destination.Protocol, s.Target.Port}.list()
		if s.Replaces {
			before := listenerOf(from, s.Destination).list()
			if before == after {
				continue
			}
			e.drop = append(e.drop, on(before, destination(s.Destination)))
		}
		e.add = append(e.add, on(after, destination(s.Destination)))
	}
	for _, d := range c.Unsteer {
		e.drop = append(e.drop, on(listenerOf(from, d).list(), destination(d)))
	}
	change(&e, listRefuse, &c.Refuse, destination)
	change(&e, listSilent, &c.Silent, destination)
	change(&e, listLinger, &c.Lingering, destination)
	change(&e, listOwn, &c.Own, destination)
	change(&e, listCluster, &c.ClusterIPs, address)
	change(&e, listNode, &c.Node, address)
	change(&e, listLocal, &c.Local, func(p netip.Prefix) element { return element{prefix: p} })

	seen := map[service.Destination]bool{}
	for d := range c.Touched {
		if seen[d] {
			continue
		}
		seen[d] = true
		was, is := from.NonLocal.Has(d.Addr) && from.Names(d), to.NonLocal.Has(d.Addr) && to.Names(d)
		switch {
		case is && !was:
			e.add = append(e.add, on(listForeign, destination(d)))
		case was && !is:
			e.drop = append(e.drop, on(listForeign, destination(d)))
		}
	}
	// Drop cluster IPs before destinations: a cluster IP refuses ports that have no destination.
	slices.Reverse(e.drop)
	return e
}

func on(l list, e element) edit { return edit{service.FamilyOf(e.prefix.Addr()), l, e} }

func listenerOf(p *redirect.Plan, d service.Destination) listener {
	t, _ := p.Steer.Get(d)
	return listener{d.Protocol, t.Port}
}

func change[K redirect.Key](e *edits, l list, d *redirect.Delta[K], toElement func(K) element) {
	for _, k := range d.Add {
		e.add = append(e.add, on(l, toElement(k)))
	}
	for _, k := range d.Drop {
		e.drop = append(e.drop, on(l, toElement(k)))
	}
}
