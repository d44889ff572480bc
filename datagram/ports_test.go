package datagram

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// The server of an endpoint on this node is down, and the kernel may choose its port for
// the session's socket. A socket that is connected to itself would echo the client's
// datagrams.
func TestEndpointOnThisNodeIsNeverTheSessionsOwnSocket(t *testing.T) {
	for _, vip := range []string{vip4, vip6} {
		t.Run(vip, func(t *testing.T) {
			lab := netns.NewLab(t, 0)
			must.OK(t, lab.Node.SetSysctl("net/ipv4/ip_local_port_range", "40000 40007"))
			own := at(lab.Node.IPv4, 40002)
			if vip == vip6 {
				own = at(lab.Node.IPv6, 40002)
			}
			n := newNode(t, lab, nil)
			n.host = hostnet.NewAddresses([]netip.Addr{own.Addr()})
			n.apply(svc("down", vip, nil, own))
			for range 48 {
				c := client(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(vip), 53).String())
				if got, err := ask(c, "hello", 20*time.Millisecond); err == nil {
					t.Fatalf("nobody listens, and the client got %q", got)
				}
			}
			// The server can still bind its port.
			lab.Node.WitnessUDPAt(t, own.String())
			c := client(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(vip), 53).String())
			if got, err := ask(c, "hello", patience); err != nil || !strings.HasSuffix(got, "\nhello") {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// Sessions do not use ports that the administrator reserved for servers, neither on
// clients' addresses nor, with sockets that bypass connection tracking, on the node's.
func TestReservedPortsAreNotTaken(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Node.TrackConnections(t)
	must.OK(t, lab.Node.SetSysctl("net/ipv4/ip_local_reserved_ports", "10000-29899,29950-29999"))
	n := newNode(t, lab, func(o *Options) { o.Traits.Replies.Tracking.Look() })
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("six", vip6, nil, at(lab.Backends[0].IPv6, 5300)))
	const sessions = 10
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, vip := range []string{vip4 + ":53", "[" + vip6 + "]:53"} {
			for range sessions {
				if got, err := ask(client(t, from, vip), "hello", patience); err != nil || got != "b1:5300\nhello" {
					t.Fatalf("%s: %q, %v", from.Name(), got, err)
				}
			}
		}
	}
	var table []byte
	err := lab.Node.Do(func() (err error) {
		table, err = exec.Command("cat", "/proc/thread-self/net/udp", "/proc/thread-self/net/udp6").Output()
		return err
	})
	must.OK(t, err)
	found := 0
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || !strings.HasSuffix(fields[2], ":14B4") { // connected to port 5300
			continue
		}
		_, port, _ := strings.Cut(fields[1], ":")
		if found++; port < "74CC" || port > "74FD" { // 29900 to 29949
			t.Errorf("a session has port 0x%s: %s", port, line)
		}
	}
	check.Equalf(t, found, 4*sessions, "sessions found")
}
