package tproxy

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/redirect"
)

// kind is one of the sets that the rules look into; there is one of each kind
// for each family.
type kind uint8

const (
	steer   kind = iota // map VIP . protocol . port to listener port
	refuse              // set of VIP . protocol . port
	silent              // likewise
	cluster             // set of cluster IPs
	local               // set of ranges
	kinds
)

var kindNames = [kinds]string{"steer", "refuse", "silent", "cluster", "local"}

// version is the Internet Protocol's; it indexes families.
type version uint8

const (
	v4 version = iota
	v6
	versions
)

// family is what the rules of one address family differ by.
var families = [versions]struct {
	name         string
	digit        string
	nfproto      byte
	addrLen      uint32
	source, dest uint32 // offsets in the network header
	regProtocol  uint32 // the registers after the address
	regPort      uint32
	addrType     nftables.SetDatatype
	listen       []byte
}{
	{"ip", "4", syscall.AF_INET, 4, 12, 16, 9, 10, nftables.TypeIPAddr, redirect.ListenIPv4.AsSlice()},
	{"ip6", "6", syscall.AF_INET6, 16, 8, 24, 12, 13, nftables.TypeIP6Addr, redirect.ListenIPv6.AsSlice()},
}

// Registers: 1 holds the key (an IPv4 address fills the first quarter of it, so
// that what follows is in the quarters 9 and 10; an IPv6 address fills all of
// it, and what follows is in 12 and 13), 3 the port of the listener, 4 its
// address.
const (
	regKey    = 1
	regTarget = 3
	regListen = 4
)

// hookPriority is just before what others usually put before connection
// tracking (raw, -300), and after the reassembly of fragments (-400), so that
// each packet has its ports.
var hookPriority nftables.ChainPriority = -310

const (
	chainPrerouting = "prerouting"
	chainOutput     = "output"
	chainRefuse     = "refuse"
	chainSilence    = "silence"
)

func chainTo(v version) string   { return "to" + families[v].digit }
func chainRest(v version) string { return "rest" + families[v].digit }

// setName is a kind's name of a generation: "steer4-7". A new generation is
// filled beside the one in use when it is too large for one transaction.
func setName(k kind, v version, generation int) string {
	return kindNames[k] + families[v].digit + "-" + strconv.Itoa(generation)
}

// generationOf gives the generation that a set's name says.
func generationOf(name string) (generation int, ok bool) {
	base, number, ok := strings.Cut(name, "-")
	if !ok {
		return 0, false
	}
	generation, err := strconv.Atoi(number)
	if err != nil || generation < 0 {
		return 0, false
	}
	for k := range kinds {
		for v := range versions {
			if base == kindNames[k]+families[v].digit {
				return generation, true
			}
		}
	}
	return 0, false
}

// makeSet describes a set, for creating it or its elements.
func makeSet(table *nftables.Table, k kind, v version, generation int) *nftables.Set {
	s := &nftables.Set{
		Table:        table,
		Name:         setName(k, v, generation),
		KeyType:      families[v].addrType,
		KeyByteOrder: binaryutil.BigEndian,
	}
	switch k {
	case steer, refuse, silent:
		s.KeyType = nftables.MustConcatSetType(families[v].addrType, nftables.TypeInetProto, nftables.TypeInetService)
		if k == steer {
			s.IsMap = true
			s.DataType = nftables.TypeInetService
		}
	case local:
		s.Interval = true
	}
	return s
}

// makeChains gives the chains, hooked ones first.
func makeChains(table *nftables.Table) []*nftables.Chain {
	accept := nftables.ChainPolicyAccept
	chains := []*nftables.Chain{
		{Name: chainPrerouting, Hooknum: nftables.ChainHookPrerouting},
		{Name: chainOutput, Hooknum: nftables.ChainHookOutput},
		{Name: chainTo(v4)}, {Name: chainTo(v6)}, {Name: chainRest(v4)}, {Name: chainRest(v6)},
		{Name: chainRefuse}, {Name: chainSilence},
	}
	for _, c := range chains {
		c.Table = table
		if c.Hooknum != nil {
			c.Type, c.Priority, c.Policy = nftables.ChainTypeFilter, &hookPriority, &accept
		}
	}
	return chains
}

// rule is one rule before it is added.
type rule struct {
	chain string
	exprs []expr.Any
}

func (r *rule) add(exprs ...expr.Any) { r.exprs = append(r.exprs, exprs...) }

// makeRules gives the rules that look into the sets of a generation. Their
// number does not depend on anything. Every packet of the node passes them, so
// that what is not for a service meets as few as possible: two look-ups on its
// way in and none on its way out.
//
//	chain prerouting: meta nfproto ipv4 goto to4
//	                  meta nfproto ipv6 goto to6
//	chain to4:        tproxy ip to 127.83.76.1:ip daddr . meta l4proto . th dport map @steer4 notrack accept
//	                  ip daddr @local4 goto rest4
//	chain rest4:      ip daddr . meta l4proto . th dport @refuse4 goto refuse
//	                  ip daddr . meta l4proto . th dport @silent4 goto silence
//	                  ip daddr @cluster4 goto refuse
//	                  goto silence
//	chain refuse:     meta l4proto tcp tcp flags & (syn | ack) == syn reject with tcp reset
//	                  socket transparent 1 notrack accept
//	                  meta l4proto tcp reject with tcp reset
//	                  meta l4proto udp reject with icmpx port-unreachable      (sctp too)
//	chain silence:    as refuse, with drop
//	chain output:     socket transparent 1 ip saddr @local4 notrack accept     (ip6 too)
//	                  meta oif lo ip daddr @local4 notrack accept              (ip6 too)
func makeRules(generation int) []rule {
	var rules []rule
	for v := range versions {
		r := rule{chain: chainPrerouting}
		r.add(isFamily(v)...)
		r.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainTo(v)})
		rules = append(rules, r)
	}
	for v := range versions {
		rules = append(rules, rulesTo(v, generation)...)
	}
	rules = append(rules, rulesForRest(chainRefuse, rejectTCP, rejectOther)...)
	rules = append(rules, rulesForRest(chainSilence, drop, drop)...)
	return append(rules, rulesOutput(generation)...)
}

func rulesTo(v version, generation int) []rule {
	f := families[v]
	key := []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.addrLen},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.regProtocol},
		&expr.Payload{DestRegister: f.regPort, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}
	// A rule ends where tproxy finds neither an established socket nor a
	// listener: then the address's own rules refuse.
	steering := rule{chain: chainTo(v)}
	steering.add(isFamily(v)...)
	steering.add(key...)
	steering.add(&expr.Lookup{SourceRegister: regKey, DestRegister: regTarget, IsDestRegSet: true, SetName: setName(steer, v, generation)})
	steering.add(toListener(v)...)
	steering.add(&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept})

	ours := rule{chain: chainTo(v)}
	ours.add(isFamily(v)...)
	ours.add(inSet(f.dest, f.addrLen, setName(local, v, generation))...)
	ours.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainRest(v)})

	rules := []rule{steering, ours}
	for _, rest := range []struct {
		set  kind
		goTo string
	}{{refuse, chainRefuse}, {silent, chainSilence}} {
		r := rule{chain: chainRest(v)}
		r.add(isFamily(v)...)
		r.add(key...)
		r.add(
			&expr.Lookup{SourceRegister: regKey, SetName: setName(rest.set, v, generation)},
			&expr.Verdict{Kind: expr.VerdictGoto, Chain: rest.goTo},
		)
		rules = append(rules, r)
	}
	other := rule{chain: chainRest(v)}
	other.add(isFamily(v)...)
	other.add(inSet(f.dest, f.addrLen, setName(cluster, v, generation))...)
	other.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainRefuse})
	unallocated := rule{chain: chainRest(v)}
	unallocated.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainSilence})
	return append(rules, other, unallocated)
}

// toListener hands a packet to the listener whose port is in a register.
func toListener(v version) []expr.Any {
	f := families[v]
	return []expr.Any{
		&expr.Immediate{Register: regListen, Data: f.listen},
		&expr.TProxy{Family: f.nfproto, TableFamily: byte(nftables.TableFamilyINet), RegAddr: regListen, RegPort: regTarget},
	}
}

// rulesForRest is what happens to packets for addresses of ours that are not
// steered. A TCP packet that opens a connection is turned away at once, so that
// a transparent wildcard listener of somebody else's cannot have it; what
// belongs to an established transparent socket passes (A8.1, A8.7); the rest is
// turned away. Other protocols, ICMP above all, pass.
func rulesForRest(chain string, turnTCP, turnOther expr.Any) []rule {
	opening := rule{chain: chain}
	opening.add(isProtocol(syscall.IPPROTO_TCP)...)
	opening.add(
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: regKey, DestRegister: regKey, Len: 1, Mask: []byte{tcpSYN | tcpACK}, Xor: []byte{0}},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{tcpSYN}},
		turnTCP,
	)
	established := rule{chain: chain}
	established.add(isTransparent()...)
	established.add(&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept})
	return []rule{
		opening,
		established,
		{chain, append(isProtocol(syscall.IPPROTO_TCP), turnTCP)},
		{chain, append(isProtocol(syscall.IPPROTO_UDP), turnOther)},
		{chain, append(isProtocol(protoSCTP), turnOther)},
	}
}

// rulesOutput keeps packets of this node from and to the services' addresses
// out of connection tracking: it would otherwise see half of each connection.
// The proxy's own to clients come from transparent sockets, which is known
// without a look-up, and those of this node's clients leave by lo: packets to
// endpoints on other hosts pass with two comparisons.
func rulesOutput(generation int) []rule {
	var rules []rule
	for v := range versions {
		f := families[v]
		toLoopback := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIF, Register: regKey},
			&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: binaryutil.NativeEndian.PutUint32(loopbackIndex)},
		}
		for _, one := range []struct {
			first  []expr.Any
			offset uint32
		}{{isTransparent(), f.source}, {toLoopback, f.dest}} {
			r := rule{chain: chainOutput}
			r.add(isFamily(v)...)
			r.add(one.first...)
			r.add(inSet(one.offset, f.addrLen, setName(local, v, generation))...)
			r.add(&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept})
			rules = append(rules, r)
		}
	}
	return rules
}

// isTransparent matches packets of sockets that are set to IP_TRANSPARENT.
func isTransparent() []expr.Any {
	return []expr.Any{
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{1}},
	}
}

const (
	protoSCTP = 132
	tcpSYN    = 0x02
	tcpACK    = 0x10

	// loopbackIndex is lo's in every network namespace.
	loopbackIndex = 1

	// From linux/netfilter/nf_tables.h.
	rejectWithReset      = 1 // NFT_REJECT_TCP_RST
	rejectWithICMPX      = 2 // NFT_REJECT_ICMPX_UNREACH
	icmpxPortUnreachable = 1 // NFT_REJECT_ICMPX_PORT_UNREACH
)

var (
	rejectTCP   = &expr.Reject{Type: rejectWithReset}
	rejectOther = &expr.Reject{Type: rejectWithICMPX, Code: icmpxPortUnreachable}
	drop        = &expr.Verdict{Kind: expr.VerdictDrop}
)

// isFamily comes first in each rule that looks at addresses, also where the
// chain has seen to it already: without it, nft shows offsets instead of names.
func isFamily(v version) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{families[v].nfproto}},
	}
}

func isProtocol(p byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{p}},
	}
}

func inSet(offset, length uint32, set string) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: regKey, SetName: set},
	}
}

// describe says a chain's hook as nft does.
func describe(c *nftables.Chain) string {
	if c.Hooknum == nil || c.Priority == nil {
		return "chain " + c.Name
	}
	return fmt.Sprintf("chain %s %s hook %d priority %d", c.Name, c.Type, *c.Hooknum, *c.Priority)
}
