package netns

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Numbers from linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	newConntrack = 1 << 8 // NFNL_SUBSYS_CTNETLINK, and IPCTNL_MSG_CT_NEW, which is 0

	tupleOrig, tupleReply, ctStatus, ctTimeout = 1, 2, 3, 7
	tupleIP, tupleProto                        = 1, 2
	ipv4Src, ipv4Dst                           = 1, 2
	protoNum, protoSrcPort, protoDstPort       = 1, 2, 3

	// The entry has seen a reply, must not be evicted, and is in the table.
	seenReplyAssuredConfirmed = 2 | 4 | 8
)

// TrackConnections enables connection tracking, like any rule that matches a
// connection's state.
func (n *Namespace) TrackConnections(t testing.TB) {
	t.Helper()
	conn := must.Get(nftables.New(nftables.WithNetNSFd(n.FD())))(t)
	table := conn.AddTable(&nftables.Table{Name: "track", Family: nftables.TableFamilyINet})
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "input", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: []byte{0xff, 0xff, 0xff, 0xff}},
	}})
	must.OKf(t, conn.Flush(), "%s: track connections", n.name)
}

// Tracked returns the number of the namespace's connection tracking entries.
func (n *Namespace) Tracked(t testing.TB) int {
	t.Helper()
	return n.number(t, "net/netfilter/nf_conntrack_count")
}

func (n *Namespace) number(t testing.TB, key string) int {
	t.Helper()
	text, err := n.Sysctl(key)
	must.OKf(t, err, "%s", n.name)
	value, err := strconv.Atoi(text)
	must.OKf(t, err, "%s: %s", n.name, key)
	return value
}

// FillConntrack fills the namespace's connection tracking table with entries that
// cannot be evicted, so that no tracked connection can begin. All namespaces share
// the table's size, which one namespace cannot lower, so FillConntrack makes as
// many entries as the machine allows.
func (n *Namespace) FillConntrack(t testing.TB) {
	t.Helper()
	conn, err := netlink.Dial(familyNetfilter, &netlink.Config{NetNS: n.FD()})
	must.OKf(t, err, "%s", n.name)
	defer conn.Close()
	size := n.number(t, "net/netfilter/nf_conntrack_max")
	const batch = 256
	list := make([]netlink.Message, batch)
	for j := range list {
		if list[j], err = conntrackEntry(); err != nil {
			t.Fatal(err)
		}
	}
	for i := 0; n.Tracked(t) < size; {
		if i > 2*size {
			t.Fatalf("%s: conntrack has %d of %d entries and takes no more", n.name, n.Tracked(t), size)
		}
		for range min(size, 1<<16) / batch {
			for _, m := range list {
				number(m, i)
				i++
			}
			// The kernel reports each entry without room in a message that nobody
			// reads.
			must.OKf(t, must.Err(conn.SendMessages(list)), "%s: conntrack entries", n.name)
		}
	}
}

// number changes an entry's identity: it sets the client's port and the last byte
// of its address at their offsets in conntrackEntry.
func number(entry netlink.Message, i int) {
	const origSrc, origPort, replyDst, replyPort = 16, 44, 76, 104
	for _, at := range []int{origSrc, replyDst} {
		entry.Data[at+3] = byte(i >> 16)
	}
	for _, at := range []int{origPort, replyPort} {
		binary.BigEndian.PutUint16(entry.Data[at:], uint16(i))
	}
}

// conntrackEntry builds the message that creates an entry: a UDP session between
// two unused addresses.
func conntrackEntry() (netlink.Message, error) {
	tuple := func(e *netlink.AttributeEncoder, kind uint16, src, dst netip.Addr, from, to uint16) {
		e.Nested(kind, func(e *netlink.AttributeEncoder) error {
			e.Nested(tupleIP, func(e *netlink.AttributeEncoder) error {
				e.Bytes(ipv4Src, src.AsSlice())
				e.Bytes(ipv4Dst, dst.AsSlice())
				return nil
			})
			e.Nested(tupleProto, func(e *netlink.AttributeEncoder) error {
				e.Uint8(protoNum, 17)
				e.Uint16(protoSrcPort, from)
				e.Uint16(protoDstPort, to)
				return nil
			})
			return nil
		})
	}
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	src, dst := netip.MustParseAddr("192.0.2.0"), netip.MustParseAddr("192.0.2.255")
	tuple(e, tupleOrig, src, dst, 0, 9)
	tuple(e, tupleReply, dst, src, 9, 0)
	e.Uint32(ctStatus, seenReplyAssuredConfirmed)
	e.Uint32(ctTimeout, 3600)
	attrs, err := e.Encode()
	if err != nil {
		return netlink.Message{}, fmt.Errorf("conntrack entry: %w", err)
	}
	return netlink.Message{
		Header: netlink.Header{Type: newConntrack, Flags: netlink.Request | netlink.Create},
		Data:   append([]byte{2, 0, 0, 0}, attrs...), // AF_INET
	}, nil
}
