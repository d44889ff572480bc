package tproxy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// kind is one of the sets that the rules look into; there is one of each kind
// for each family.
type kind uint8

const (
	steer   kind = iota // map VIP . protocol . port to listener port
	take                // the same for addresses that are not ours
	refuse              // set of VIP . protocol . port
	silent              // likewise
	cluster             // set of cluster IPs
	local               // set of ranges
	foreign             // set of addresses that are not ours
	linger              // set of client . port . address . port of flows to those
	own                 // set of address . protocol . port of sockets of ours
	ownPort             // set of the ports of these, which the kernel keeps as bits
	node                // set of the node's own addresses
	counted             // set of client . VIP . protocol . port of packets that are refused or dropped, which the kernel fills
	kinds
)

var kindNames = [kinds]string{"steer", "take", "refuse", "silent", "cluster", "local", "foreign", "linger", "own", "ownport", "node", "counted"}

// version is the Internet Protocol's; it indexes families.
type version = service.Family

const v4, v6, versions = service.IPv4, service.IPv6, redirect.Families

// family is what the rules of one address family differ by.
var families = [versions]struct {
	name         string
	digit        string
	nfproto      byte
	addrLen      uint32
	source, dest uint32 // offsets in the network header
	regProtocol  uint32 // the registers after the address
	regPort      uint32
	regFlow      [3]uint32 // those after the first address of a flow
	regCounted   [3]uint32 // those after the client's address of what is counted
	icmp         byte
	addrType     nftables.SetDatatype
	listen       []byte
}{
	{"ip", "4", syscall.AF_INET, 4, 12, 16, 9, 10, [3]uint32{9, 10, 11}, [3]uint32{9, 10, 11}, syscall.IPPROTO_ICMP, nftables.TypeIPAddr, redirect.ListenIPv4.AsSlice()},
	{"ip6", "6", syscall.AF_INET6, 16, 8, 24, 12, 13, [3]uint32{12, 13, 17}, [3]uint32{12, 16, 17}, syscall.IPPROTO_ICMPV6, nftables.TypeIP6Addr, redirect.ListenIPv6.AsSlice()},
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

// answersPriority is just after what translates destinations, and undoes the translation
// of sources (dstnat, -100).
var answersPriority nftables.ChainPriority = -90

// The chains; those of a family have its digit added.
const (
	chainPrerouting = "prerouting"
	chainOutput     = "output"
	chainAnswers    = "answers" // what comes in, after translation

	// Of a family:
	chainTo      = "to"      // what comes in
	chainRest    = "rest"    // what comes in for a range of ours
	chainForeign = "foreign" // what comes in for an address that is not ours
	chainFrom    = "from"    // what this node sends
	chainProxy   = "proxy"   // what its transparent sockets send
	chainInside  = "inside"  // what it sends to itself
	chainOut     = "out"     // what it sends to addresses that are not ours
	chainBack    = "back"    // what comes in, after translation

	// Of both:
	chainListener = "listener" // what a listener was found for
	chainRefuse   = "refuse"
	chainSilence  = "silence"
	chainNode     = "node"    // what may be an answer to a socket on the node's address
	chainOurs     = "ours"    // the same, for a transparent socket
	chainReplies  = "replies" // what may be an answer to a client's address
	chainDivert   = "divert"  // what is for a transparent socket, by the reply table
	chainKeep     = "keep"    // the same, by the steer table
	chainAside    = "aside"   // what this node sends is to come back by lo
	chainTurn     = "turn"    // the same, but refuse what opens a connection
)

var (
	familyChains = []string{chainTo, chainRest, chainForeign, chainFrom, chainProxy, chainInside, chainOut, chainBack}
	sharedChains = []string{chainListener, chainRefuse, chainSilence, chainReplies, chainNode, chainOurs, chainDivert, chainKeep, chainAside, chainTurn}
)

func chainOf(v version, name string) string { return name + families[v].digit }

// setName is a kind's name of a generation: "steer4-7". A new generation is
// filled beside the one in use when it is too large for one transaction.
func setName(k kind, v version, generation int) string {
	return kindNames[k] + families[v].digit + "-" + strconv.Itoa(generation)
}

// generationOf returns the generation that a set's name says.
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

// mark is the comment of each set, by which a table of ours is told from somebody
// else's of the same name.
const mark = "made by sluice"

// countedFor is how long a client and a destination are counted after their first packet.
// Verify and refusals do not rely on it.
const countedFor = time.Minute

// makeSet describes a set, for creating it or its elements.
func makeSet(table *nftables.Table, k kind, v version, generation int) *nftables.Set {
	s := &nftables.Set{
		Table:        table,
		Name:         setName(k, v, generation),
		KeyType:      families[v].addrType,
		KeyByteOrder: binaryutil.BigEndian,
		Comment:      mark,
	}
	switch k {
	case steer, take, refuse, silent, own:
		s.KeyType = nftables.MustConcatSetType(families[v].addrType, nftables.TypeInetProto, nftables.TypeInetService)
		if k == steer || k == take {
			s.IsMap = true
			s.DataType = nftables.TypeInetService
		}
	case linger:
		end := []nftables.SetDatatype{families[v].addrType, nftables.TypeInetService}
		s.KeyType = nftables.MustConcatSetType(slices.Concat(end, end)...)
	case local:
		s.Interval = true
	case ownPort:
		s.KeyType = nftables.TypeInetService
	case counted:
		s.KeyType = nftables.MustConcatSetType(families[v].addrType, families[v].addrType, nftables.TypeInetProto, nftables.TypeInetService)
		s.Dynamic, s.HasTimeout, s.Timeout, s.Size = true, true, countedFor, redirect.MaxRefusals
	case cluster, foreign, node:
	}
	return s
}

// makeChains returns the chains, hooked ones first.
func makeChains(table *nftables.Table, n numbers) []*nftables.Chain {
	o := n.omitted
	accept := nftables.ChainPolicyAccept
	var chains []*nftables.Chain
	if !o.input() {
		chains = append(chains, &nftables.Chain{Name: chainPrerouting, Hooknum: nftables.ChainHookPrerouting, Type: nftables.ChainTypeFilter})
	}
	if !o.output() {
		// A mark that is set in a chain of this type changes the route.
		chains = append(chains, &nftables.Chain{Name: chainOutput, Hooknum: nftables.ChainHookOutput, Type: nftables.ChainTypeRoute})
	}
	if n.answers() {
		chains = append(chains, &nftables.Chain{Name: chainAnswers, Hooknum: nftables.ChainHookPrerouting, Type: nftables.ChainTypeFilter, Priority: &answersPriority})
	}
	for _, name := range familyChains {
		for v := range versions {
			chains = append(chains, &nftables.Chain{Name: chainOf(v, name)})
		}
	}
	for _, name := range sharedChains {
		chains = append(chains, &nftables.Chain{Name: name})
	}
	for _, c := range chains {
		c.Table = table
		if c.Hooknum == nil {
			continue
		}
		c.Policy = &accept
		if c.Priority == nil {
			c.Priority = &hookPriority
		}
	}
	return chains
}

// describe says a chain's hook as nft does.
func describe(c *nftables.Chain) string {
	if c.Hooknum == nil || c.Priority == nil {
		return "chain " + c.Name
	}
	return fmt.Sprintf("chain %s %s hook %d priority %d", c.Name, c.Type, *c.Hooknum, *c.Priority)
}
