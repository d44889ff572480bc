package netns

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Dump returns everything in the namespace that steering may change, as the kernel
// reports it: nftables of all families with rules and elements, policy routing
// rules, and the routes of all tables. Two dumps are equal if nothing has changed,
// including the handles of other programs' rules; Dump leaves out the counters of
// rules. Settle a lab before comparing its dumps.
func (n *Namespace) Dump(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	must.OKf(t, n.dump(&b), "dump of %s", n.name)
	return b.String()
}

// Numbers of netlink, from linux/netlink.h, rtnetlink.h and nf_tables.h.
const (
	familyRoute     = 0
	familyNetfilter = 12
	subsysNFTables  = 10 << 8

	getRoute   = 26
	getRule    = 34
	getTable   = subsysNFTables | 1
	getChain   = subsysNFTables | 4
	getNFTRule = subsysNFTables | 7
	getSet     = subsysNFTables | 10
	getElement = subsysNFTables | 13

	attrCacheInfo = 12 // RTA_CACHEINFO: ages and use counts

	attrExpressions    = 4 // NFTA_RULE_EXPRESSIONS
	attrExpressionName = 1 // NFTA_EXPR_NAME
	attrExpressionData = 2 // NFTA_EXPR_DATA
)

func (n *Namespace) dump(b *strings.Builder) error {
	route, err := netlink.Dial(familyRoute, &netlink.Config{NetNS: n.FD()})
	if err != nil {
		return err
	}
	defer route.Close()
	for _, what := range []struct {
		name string
		kind netlink.HeaderType
	}{{"route", getRoute}, {"rule", getRule}} {
		answers, err := dumpAll(route, what.kind, make([]byte, 12))
		if err != nil {
			return fmt.Errorf("%ss: %w", what.name, err)
		}
		for _, m := range answers {
			fmt.Fprintf(b, "%s %x\n", what.name, withoutAge(m.Data))
		}
	}
	// In another namespace, the library loses the error of creating a socket.
	filter, err := netlink.Dial(familyNetfilter, nil)
	if errors.Is(err, syscall.EPROTONOSUPPORT) {
		return nil // a kernel without netfilter
	}
	if err == nil {
		_ = filter.Close()
		filter, err = netlink.Dial(familyNetfilter, &netlink.Config{NetNS: n.FD()})
	}
	if err != nil {
		return err
	}
	defer filter.Close()
	return dumpNFTables(b, filter)
}

// dumpNFTables leaves out the header of a message: the family is known, and the
// generation is not part of the state.
func dumpNFTables(b *strings.Builder, conn *netlink.Conn) error {
	var sets []netlink.Message
	for _, what := range []struct {
		name string
		kind netlink.HeaderType
	}{{"table", getTable}, {"chain", getChain}, {"nft rule", getNFTRule}, {"set", getSet}} {
		answers, err := dumpAll(conn, what.kind, make([]byte, 4))
		if what.kind == getTable && errors.Is(err, syscall.EINVAL) {
			return nil // a kernel without nf_tables
		}
		if err != nil {
			return fmt.Errorf("%ss: %w", what.name, err)
		}
		for _, m := range answers {
			if what.kind == getNFTRule {
				withoutCounts(m.Data[4:])
			}
			fmt.Fprintf(b, "%s %d %q\n", what.name, m.Data[0], m.Data[4:])
		}
		if what.kind == getSet {
			sets = answers
		}
	}
	for _, s := range sets {
		elements, err := dumpElements(conn, s)
		if err != nil {
			return err
		}
		for _, m := range elements {
			fmt.Fprintf(b, "elements %q\n", m.Data[4:])
		}
	}
	return nil
}

// dumpElements requests the elements of a set by its table and name, the first two
// attributes of its description.
func dumpElements(conn *netlink.Conn, set netlink.Message) ([]netlink.Message, error) {
	attrs, err := netlink.UnmarshalAttributes(set.Data[4:])
	if err != nil {
		return nil, err
	}
	var which []netlink.Attribute
	for _, a := range attrs {
		if a.Type == 1 || a.Type == 2 {
			which = append(which, a)
		}
	}
	data, err := netlink.MarshalAttributes(which)
	if err != nil {
		return nil, err
	}
	return dumpAll(conn, getElement, append([]byte{set.Data[0], 0, 0, 0}, data...))
}

func dumpAll(conn *netlink.Conn, kind netlink.HeaderType, data []byte) ([]netlink.Message, error) {
	answers, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | netlink.Dump},
		Data:   data,
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(answers, func(a, b netlink.Message) int {
		return cmp.Or(cmp.Compare(a.Header.Type, b.Header.Type), slices.Compare(a.Data, b.Data))
	})
	return answers, nil
}

// withoutAge blanks a route's attribute that changes by itself.
func withoutAge(data []byte) []byte {
	const header = 12
	if len(data) < header {
		return data
	}
	for kind, value := range attributes(data[header:]) {
		if kind == attrCacheInfo {
			clear(value)
		}
	}
	return data
}

// withoutCounts blanks the counters in a rule, as in each rule of iptables: any
// packet changes them.
func withoutCounts(rule []byte) {
	for kind, expressions := range attributes(rule) {
		if kind != attrExpressions {
			continue
		}
		for _, expression := range attributes(expressions) {
			name := ""
			for kind, value := range attributes(expression) {
				switch {
				case kind == attrExpressionName:
					name = string(bytes.TrimRight(value, "\x00"))
				case kind == attrExpressionData && name == "counter":
					clear(value)
				}
			}
		}
	}
}

// attributes returns the netlink attributes in data, each with its type and its
// value, which is part of data.
func attributes(data []byte) iter.Seq2[uint16, []byte] {
	const flags = 0xc000 // nested, network byte order
	return func(yield func(uint16, []byte) bool) {
		for rest := data; len(rest) >= 4; {
			size := int(binary.NativeEndian.Uint16(rest))
			if size < 4 || size > len(rest) || !yield(binary.NativeEndian.Uint16(rest[2:])&^flags, rest[4:size]) {
				return
			}
			rest = rest[min((size+3)&^3, len(rest)):]
		}
	}
}
