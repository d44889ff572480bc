package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

func TestLabHostsReachEachOther(t *testing.T) {
	lab := NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	for _, from := range []*Host{lab.Client, lab.Node, lab.Backends[0]} {
		for _, b := range lab.Backends {
			for _, ip := range []netip.Addr{b.IPv4, b.IPv6} {
				got, err := from.Ask("tcp", netip.AddrPortFrom(ip, 8080).String())
				if want := b.Name() + ":8080"; err != nil || got != want {
					t.Errorf("%s to %s: got %q, %v, want %q", from.Name(), ip, got, err, want)
				}
			}
		}
	}
}

func TestEchoSaysWhoConnected(t *testing.T) {
	lab := NewLab(t, 1)
	echo := lab.Backends[0].EchoTCP(t, 8080)
	for _, to := range []netip.Addr{lab.Backends[0].IPv4, lab.Backends[0].IPv6} {
		must.OK(t, must.Err(lab.Client.Ask("tcp", netip.AddrPortFrom(to, 8080).String())))
	}
	peers := echo.Peers()
	if len(peers) != 2 || peers[0].Addr() != lab.Client.IPv4 || peers[1].Addr() != lab.Client.IPv6 {
		t.Errorf("got %v, want %v and %v", peers, lab.Client.IPv4, lab.Client.IPv6)
	}
	echo.Close()
	_, err := lab.Client.Dial("tcp", netip.AddrPortFrom(lab.Backends[0].IPv4, 8080).String())
	check.ErrorIsf(t, err, syscall.ECONNREFUSED, "after Close")
}

func TestEchoUDP(t *testing.T) {
	lab := NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 53)
	for _, ip := range []netip.Addr{lab.Backends[0].IPv4, lab.Backends[0].IPv6} {
		c := lab.Client.Connect(t, "udp", netip.AddrPortFrom(ip, 53).String())
		check.Equalf(t, exchange(t, c, "hello"), "b1:53\nhello", "%s", ip)
	}
}

func exchange(t *testing.T, c net.Conn, text string) string {
	t.Helper()
	must.OK(t, must.Err(c.Write([]byte(text))))
	_ = c.SetReadDeadline(time.Now().Add(dialTimeout))
	buf := make([]byte, 64)
	n := must.Get(c.Read(buf))(t)
	return string(buf[:n])
}

func TestCommandRunsInside(t *testing.T) {
	ns := New(t, "alone")
	out := must.Get(ns.Command(t, "/bin/cat", "/proc/net/dev").Output())(t)
	if text := string(out); strings.Count(text, ":") != 1 || !strings.Contains(text, "lo:") {
		t.Errorf("want lo alone, got:\n%s", text)
	}
	cmd := ns.Command(t, "/bin/sleep", "1000")
	must.OK(t, cmd.Start())
	link := must.Get(os.Readlink(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)))(t)
	if own, _ := os.Readlink("/proc/self/ns/net"); own == link {
		t.Errorf("the child is in the test's namespace %s", own)
	}
}

func TestDoGivesTheThreadBack(t *testing.T) {
	own := must.Get(os.Readlink("/proc/thread-self/ns/net"))(t)
	ns := New(t, "inner")
	for range 50 {
		inside := ""
		must.OK(t, ns.Do(func() (err error) {
			inside, err = os.Readlink("/proc/thread-self/ns/net")
			return err
		}))
		if inside == own {
			t.Fatal("Do ran outside of the namespace")
		}
		if now, _ := os.Readlink("/proc/thread-self/ns/net"); now != own {
			t.Fatalf("the test's own goroutine is in %s, was in %s", now, own)
		}
	}
	want := errors.New("as it is")
	if err := ns.Do(func() error { return want }); err != want {
		t.Errorf("got %v, want the function's own error", err)
	}
}

func TestDumpIsTheSameWhenNothingChanged(t *testing.T) {
	lab := NewLab(t, 1)
	lab.Settle(t)
	before := lab.Node.Dump(t)
	if !strings.Contains(before, "route ") || !strings.Contains(before, "rule ") {
		t.Errorf("dump:\n%s", before)
	}
	if _, err := lab.Node.Ask("tcp", "10.2.1.2:1"); err == nil {
		t.Error("an answer without a listener")
	}
	check.Textf(t, lab.Node.Dump(t), before, "the node afterwards")
	must.OK(t, lab.Node.AddRoute(netip.MustParsePrefix("192.0.2.0/24"), lab.Client.IPv4))
	if after := lab.Node.Dump(t); after == before {
		t.Error("a new route does not show")
	}
}

func TestDumpLeavesOutWhatRulesCount(t *testing.T) {
	lab := NewLab(t, 0)
	lab.Settle(t)
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	table := conn.AddTable(&nftables.Table{Name: "counting", Family: nftables.TableFamilyINet})
	chain := conn.AddChain(&nftables.Chain{
		Name: "input", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
	must.OK(t, conn.Flush())
	before := lab.Node.Dump(t)
	must.OK(t, lab.Client.Ping(lab.Node.IPv4))
	rules, err := conn.GetRules(table, chain)
	if err != nil || len(rules) != 1 || rules[0].Exprs[0].(*expr.Counter).Packets == 0 {
		t.Fatalf("want one rule that has counted: %v, %v", rules, err)
	}
	check.Textf(t, lab.Node.Dump(t), before, "the node afterwards")
}

// A program that another goroutine waits for when the test ends is killed, and ends both waits.
func TestProgramThatIsWaitedForAtTheEnd(t *testing.T) {
	ended := make(chan error, 1)
	for range 20 {
		t.Run("program", func(t *testing.T) {
			c := New(t, "program").Command(t, "sleep", "60")
			must.OK(t, c.Start())
			go func() { ended <- c.Wait() }()
		})
		if err := <-ended; err == nil {
			t.Error("a killed program has succeeded")
		}
	}
}
