package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/mdlayher/netlink"
)

// NFTables reads nftables as the kernel tells them. The library that writes them fails
// to read some expressions, such as tproxy, and has no generation number.
type NFTables struct {
	netns int
	conn  *netlink.Conn // nil after an error, until the next request
}

// Kinds of requests, from linux/netfilter/nf_tables.h.
const (
	GetTable   = 1
	GetChain   = 4
	GetRule    = 7
	GetSet     = 10
	GetElement = 13
	GetGen     = 16
)

// Attributes of tables, chains, rules and their expressions.
const (
	AttrTableName  = 1
	AttrChainTable = 1
	AttrChainName  = 3
	AttrChainHook  = 4
	AttrChainType  = 7
	AttrRuleTable  = 1
	AttrRuleChain  = 2
	AttrRuleExprs  = 4
	AttrExprName   = 1
	AttrExprData   = 2
)

// Object is a table, a chain or another thing of nftables.
type Object struct {
	Family byte
	Attrs  []byte // netlink attributes
}

// Attribute returns the value of the first attribute of a type, or nil.
func (o *Object) Attribute(kind uint16) []byte { return Attribute(o.Attrs, kind) }

// OpenNFTables opens a socket in a network namespace: a descriptor, or 0 for the one that
// it is called in.
func OpenNFTables(netns int) (*NFTables, error) {
	n := &NFTables{netns: netns}
	return n, n.connect()
}

func (n *NFTables) connect() error {
	// In another namespace, the library forgets the error of making a socket. A
	// kernel that has no netfilter has none in any.
	conn, err := netlink.Dial(syscall.NETLINK_NETFILTER, nil)
	if err == nil && n.netns != 0 {
		_ = conn.Close()
		conn, err = netlink.Dial(syscall.NETLINK_NETFILTER, &netlink.Config{NetNS: n.netns})
	}
	if err != nil {
		return fmt.Errorf("netfilter netlink: %w", err)
	}
	n.conn = conn
	return nil
}

// Close closes the socket.
func (n *NFTables) Close() {
	if n.conn != nil {
		_ = n.conn.Close()
		n.conn = nil
	}
}

// Get asks for objects of a family. A dump that a change interrupted is read again.
func (n *NFTables) Get(family byte, kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) ([]Object, error) {
	const subsystem, header = 10, 4 // NFNL_SUBSYS_NFTABLES; struct nfgenmsg
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		return nil, err
	}
	request := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(subsystem<<8 | kind), Flags: netlink.Request | flags},
		Data:   slices.Concat([]byte{family, 0, 0, 0}, data),
	}
	for range 10 {
		answers, err := n.ask(request)
		if errors.Is(err, syscall.EINTR) || slices.ContainsFunc(answers, interrupted) {
			continue
		}
		var all []Object
		for _, m := range answers {
			if len(m.Data) >= header {
				all = append(all, Object{m.Data[0], m.Data[header:]})
			}
		}
		return all, err
	}
	return nil, fmt.Errorf("nftables change too fast to be read: %w", syscall.EINTR)
}

func (n *NFTables) ask(request netlink.Message) ([]netlink.Message, error) {
	if n.conn == nil {
		if err := n.connect(); err != nil {
			return nil, err
		}
	}
	answers, err := n.conn.Execute(request)
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		n.Close() // it may hold answers that nobody read
	}
	return answers, err
}

func interrupted(m netlink.Message) bool {
	const flag = 0x10 // NLM_F_DUMP_INTR
	return m.Header.Flags&flag != 0
}

// Named returns an attribute that is a text.
func Named(kind uint16, s string) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: append([]byte(s), 0)}
}

// Text reads the value of an attribute that is a text.
func Text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// Number reads the value of an attribute that is a number of four bytes.
func Number(b []byte) (n uint32, is bool) {
	if len(b) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(b), true
}
