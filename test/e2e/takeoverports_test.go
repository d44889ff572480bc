package e2e

import (
	"bufio"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestTakeOverSharesReplyPorts: connections that have moved, those that stay with the process before
// and new ones share the few reply ports of each client and endpoint. No port is given twice, and none
// is missing while one is free.
func TestTakeOverSharesReplyPorts(t *testing.T) {
	t.Parallel()
	forModes(t, playReplyPorts)
}

func playReplyPorts(t *testing.T, m mode) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	gone := webOn(lab)
	gone.name, gone.vips = "gone", []string{"10.96.0.99"}
	p := prepareProxy(t, lab, []webService{webOn(lab), gone})
	p.mode, p.relayed = m, "the test counts ports of the relay"
	flags := []string{"--datapath", "relay", "--workers", "1", "--reply-ports", "61000-61031"} // in some modes, half of them are for these clients
	p.start(flags...)
	var clients []netip.Addr
	for last := byte(2); last < 7; last++ {
		a := lab.Client.IPv4.As4()
		a[3] = last
		clients = append(clients, netip.AddrFrom4(a))
		if last > 2 {
			must.OK(t, lab.Client.AddAddr("eth0", netip.PrefixFrom(clients[len(clients)-1], 24)))
		}
	}
	seen := make(map[string]string) // by which connection, by what the endpoint sees
	var open []net.Conn
	begin := func(vip string, each int) {
		t.Helper()
		for _, from := range clients {
			for range each {
				c, err := lab.Client.Dialer(&net.Dialer{Timeout: startTimeout, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}, "tcp", addresses(80, vip)[0])
				must.OK(t, err)
				t.Cleanup(func() { _ = c.Close() })
				said, err := bufio.NewReader(c).ReadString('\n')
				must.OKf(t, err, "from %s", c.LocalAddr())
				_, sees, _ := strings.Cut(strings.TrimSpace(said), " ")
				if a, err := netip.ParseAddrPort(sees); err != nil || a.Addr() != from || a.Port() < 61000 || a.Port() > 61031 {
					t.Errorf("the endpoint sees %q, want %s with a reply port", said, from)
				}
				if other := seen[sees]; other != "" {
					t.Errorf("%s and %s have the port of %s", other, c.LocalAddr(), sees)
				}
				seen[sees] = c.LocalAddr().String()
				open = append(open, c)
			}
		}
	}
	begin(gone.vips[0], 4)
	begin(vip4, 4)
	p.removeAndWait("gone", 1) // its connections stay
	for range 2 {
		next := *p
		next.start(append([]string{"--take-over"}, flags...)...)
		p.awaitLog("another sluice has taken over")
		p = &next
		begin(vip4, 4)
		alive(t, open)
	}
	for _, c := range open {
		_ = c.Close()
	}
	for _, r := range p.awaitRecords(len(open)) {
		if r.Attempts != 1 || r.End != "client_fin" {
			t.Errorf("a connection found no port at once: %+v", r)
		}
	}
	p.stop()
}
