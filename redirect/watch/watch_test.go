package watch

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func open(t *testing.T, lab *netns.Lab) *Watcher {
	t.Helper()
	w := must.Get(Open(Options{Tables: []string{"ours"}, NetNS: lab.Node.FD()}))(t)
	t.Cleanup(w.Close)
	return w
}

// told tells whether a change is told of within a time.
func told(w *Watcher, within time.Duration) bool {
	select {
	case <-w.Changed():
		return true
	case <-time.After(within):
		return false
	}
}

// patience is how long a test waits for a report; quiet is how long it makes sure
// that there is none.
const patience, quiet = 20 * time.Second, 200 * time.Millisecond

// What is done to ours is told; what others do to theirs is not.
func TestTellsOfWhatIsOurs(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	table := func(name string) *nftables.Table {
		return &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
	}
	r := must.Get(route.Open(route.Options{NetNS: lab.Node.FD(), SplitLate: true}))(t)
	t.Cleanup(r.Close)
	state := route.State{
		Local:    redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16")),
		NonLocal: redirect.SetOf(netip.MustParseAddr("192.0.2.1")), MarkSteers: true, MarkReplies: true, ReplyPorts: redirect.ReplyPorts,
	}
	nl := lab.Node.Netlink()
	_, dst, _ := net.ParseCIDR("10.210.0.0/16")
	theirs := &netlink.Route{LinkIndex: 1, Dst: dst, Table: 100, Protocol: 4}
	ours := netlink.Route{Protocol: route.Protocol, Table: syscall.RT_TABLE_LOCAL}
	mask := uint32(route.DefaultReplyMark)
	rule := netlink.NewRule()
	rule.Mark, rule.Mask, rule.Table, rule.Protocol = mask, &mask, route.DefaultReplyTable, route.Protocol
	other := netlink.NewRule()
	other.Mark, other.Table = 0x55, 55

	set := &nftables.Set{Table: table("ours"), Name: "s", KeyType: nftables.TypeIPAddr}
	for _, c := range []struct {
		name string
		tell bool
		do   func() error
	}{
		{"a table of others", false, func() error { conn.AddTable(table("theirs")); return conn.Flush() }},
		{"our table", true, func() error { conn.AddTable(table("ours")); return conn.AddSet(set, nil) }},
		{"an element of ours", true, func() error {
			return conn.SetAddElements(set, []nftables.SetElement{{Key: []byte{1, 2, 3, 4}}})
		}},
		{"nft flush ruleset", true, func() error { conn.FlushRuleset(); return nil }},
		{"routes of ours come", false, func() error { _, err := r.Apply(state); return err }},
		{"a route of others comes", false, func() error { return nl.RouteAdd(theirs) }},
		{"a route of others goes", false, func() error { return nl.RouteDel(theirs) }},
		{"a route of ours goes", true, func() error {
			list, err := nl.RouteListFiltered(netlink.FAMILY_V4, &ours, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
			if err != nil {
				return err
			}
			return nl.RouteDel(&list[0])
		}},
		{"a rule of others", false, func() error {
			if err := nl.RuleAdd(other); err != nil {
				return err
			}
			return nl.RuleDel(other)
		}},
		{"a rule of ours goes", true, func() error { return nl.RuleDel(rule) }},
		{"an address", true, func() error { return lab.Node.AddAddr("lo", netip.MustParsePrefix("10.9.9.9/32")) }},
		{"nothing", false, func() error { return nil }},
	} {
		w := open(t, lab) // one change may be told in two parts: the next step's Watcher knows of none
		must.OKf(t, c.do(), "%s", c.name)
		must.OKf(t, conn.Flush(), "%s", c.name)
		check.Equalf(t, told(w, map[bool]time.Duration{false: quiet, true: patience}[c.tell]), c.tell, "%s: told", c.name)
		w.Close()
	}
}

// Gone is called after an address was removed, and again if one was removed during the
// call.
func TestCallsWhenAnAddressIsGone(t *testing.T) {
	lab := netns.NewLab(t, 0)
	calls, resume := make(chan struct{}), make(chan struct{})
	w := must.Get(Open(Options{NetNS: lab.Node.FD(), Gone: func() { calls <- struct{}{}; <-resume }}))(t)
	t.Cleanup(w.Close)
	called := func(want bool) {
		t.Helper()
		select {
		case <-calls:
			if !want {
				t.Error("called")
			}
		case <-time.After(map[bool]time.Duration{false: quiet, true: patience}[want]):
			if want {
				t.Fatal("not called")
			}
		}
	}
	nl := lab.Node.Netlink()
	lo := must.Get(nl.LinkByName("lo"))(t)
	list := []string{"10.9.9.9/32", "fd00:9::9/128"}
	for _, a := range list {
		must.OK(t, lab.Node.AddAddr("lo", netip.MustParsePrefix(a)))
	}
	called(false)
	for _, text := range list {
		a, err := netlink.ParseAddr(text)
		if err == nil {
			err = nl.AddrDel(lo, a)
		}
		must.OK(t, err)
		if text == list[0] {
			called(true)
		}
	}
	resume <- struct{}{}
	called(true)
	resume <- struct{}{}
	called(false)
}

// Somebody who changes our table all the time is told of some times a second.
func TestTellsNotTooOften(t *testing.T) {
	lab := netns.NewLab(t, 0)
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	w := open(t, lab)
	begin, times := time.Now(), 0
	for took := time.Duration(0); took < 4*pause || times == 0 && took < patience; took = time.Since(begin) {
		conn.AddTable(&nftables.Table{Name: "ours", Family: nftables.TableFamilyINet})
		conn.DelTable(&nftables.Table{Name: "ours", Family: nftables.TableFamilyINet})
		must.OK(t, conn.Flush())
		if told(w, 0) {
			times++
		}
	}
	if most := int(time.Since(begin)/pause) + burst + 1; times == 0 || times > most {
		t.Errorf("told %d times in %v", times, time.Since(begin))
	}
}

func TestCloseEndsEverything(t *testing.T) {
	lab := netns.NewLab(t, 0)
	w := open(t, lab)
	w.Close()
	w.Close()
	if told(w, 0) {
		t.Error("told of a change after the end")
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(uint16(delRoute), []byte{2, 32, 0, 0, 255, 83, 0, 2})
	f.Add(uint16(delRule), append(make([]byte, ruleHeader), 5, 0, attrRuleProtocol, 0, 83, 0, 0, 0))
	f.Add(uint16(subsysNFTables<<8), append(make([]byte, 4), 9, 0, 1, 0, 'o', 'u', 'r', 's', 0))
	f.Add(uint16(newAddr), []byte{2, 32, 0, 0})
	w := &Watcher{tables: []string{"ours"}}
	f.Fuzz(func(_ *testing.T, kind uint16, data []byte) {
		m := mdnetlink.Message{Header: mdnetlink.Header{Type: mdnetlink.HeaderType(kind)}, Data: data}
		routeChanged(m)
		w.tableChanged(m)
	})
}
