package flow

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// localNode is a lab whose node delivers the Services' addresses to itself, as steering has it.
func localNode(t *testing.T, backends int) *netns.Lab {
	t.Helper()
	lab := netns.NewLab(t, backends)
	for _, r := range []string{"10.96.0.0/16", "fd00:96::/64"} {
		must.OK(t, lab.Node.AddLocalRoute(netip.MustParsePrefix(r)))
	}
	return lab
}

// servesNode waits until the node's own clients are the kernel's.
func (n *node) servesNode() {
	n.t.Helper()
	wait.Equal(n.t, "why the node's own clients are relayed", patience, "", n.server.NodeRelayed)
}

// dialFrom connects a socket of the node's with an address to a destination.
func (n *node) dialFrom(network string, own netip.Addr, to netip.AddrPort) net.Conn {
	n.t.Helper()
	d := &net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: own.AsSlice()}}
	if network == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: own.AsSlice()}
	}
	c, err := n.lab.Node.Dialer(d, network, to.String())
	must.OKf(n.t, err, "%s from %s to %s", network, own, to)
	n.t.Cleanup(func() { _ = c.Close() })
	return c
}

// say says a line on a new connection, and returns the first line of the answer.
func (n *node) say(c net.Conn) string {
	n.t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, err := io.WriteString(c, "hello\n")
	said := ""
	r := bufio.NewReader(c)
	if err == nil {
		said, err = r.ReadString('\n')
	}
	if err == nil { // the word itself
		_, err = r.ReadString('\n')
	}
	must.OKf(n.t, err, "%s to %s", c.LocalAddr(), c.RemoteAddr())
	return strings.TrimSpace(said)
}

// isPortOf reports whether an endpoint may see a port of a hidden client, or of one on the node: of TCP, the
// client's own one if it is free.
func isPortOf(c net.Conn, seen uint16) bool {
	if own, ok := c.LocalAddr().(*net.TCPAddr); ok {
		return int(seen) == own.Port
	}
	return seen >= bpf.FirstPort && seen <= bpf.LastPort
}

// Clients on the node itself reach endpoints by kernel flows, beside one that is dead. Each leaves one
// record, its socket has the Service's address, and the endpoint sees the node's.
func TestNodeClients(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"tcp", "udp"} {
		for _, vip := range []string{vip4, vip6} {
			for _, hidden := range []bool{false, true} {
				if network == "udp" && vip == vip6 {
					continue // the relay's
				}
				t.Run(fmt.Sprint(network, " ", vip, " hidden ", hidden), func(t *testing.T) {
					lab := localNode(t, 2)
					lab.Backends[1].WitnessTCP(t, 8080)
					lab.Backends[1].WitnessUDP(t, 8080)
					dead, endpoint, own, sees := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080), lab.Node.IPv4, "10.2.2.1"
					if vip == vip6 {
						dead, endpoint, own, sees = at(lab.Backends[0].IPv6, 8080), at(lab.Backends[1].IPv6, 8080), lab.Node.IPv6, "fd00:2:2::1"
					}
					n := newNode(t, lab, nil)
					n.config.MasqueradeAll = hidden
					n.apply(svc(vip, nil, dead, endpoint))
					n.servesNode()
					to := at(netip.MustParseAddr(vip), 80)
					if !hidden {
						sees = own.String()
					}
					const connections = 10
					for range connections {
						c := n.dialFrom(network, own, to)
						said := n.say(c)
						server, peer, _ := strings.Cut(said, " ")
						if seen, err := netip.ParseAddrPort(peer); server != "b2:8080" || err != nil || seen.Addr().String() != sees || !isPortOf(c, seen.Port()) || c.RemoteAddr().String() != to.String() {
							t.Errorf("%q, to %s from %s", said, c.RemoteAddr(), c.LocalAddr())
						}
						_ = c.Close()
					}
					if network == "tcp" {
						wait.True(t, "all flows have ended", func() bool { return !n.hasOpenFlow() })
					}
					n.stop()
					n.left = true
					n.end()
					records := n.taken()
					must.Equalf(t, len(records), connections, "records of %d connections", connections)
					failed := 0
					for _, r := range records {
						failed += len(r.Failed)
						if r.Path != conntrack.Kernel || r.Endpoint.Addr != endpoint || network == "tcp" && (r.End != conntrack.ClientFin || !r.Connected) || r.BytesFromClient != 6 {
							t.Errorf("%+v", r)
						}
					}
					if failed == 0 {
						t.Error("no connection met the dead endpoint")
					}
				})
			}
		}
	}
}

// Open connections of the node's own clients go on without the process, and the next one adopts them.
// Its end takes the device with it.
func TestNodeClientsAreAdopted(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	lab.Backends[0].WitnessUDP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	first.apply(services)
	first.servesNode()
	open := make(map[string]net.Conn)
	for _, network := range []string{"tcp", "udp"} {
		open[network] = first.dialFrom(network, lab.Node.IPv4, netip.MustParseAddrPort(vip4+":80"))
		first.say(open[network])
	}
	echo := func() {
		t.Helper()
		for network, c := range open {
			_ = c.SetDeadline(time.Now().Add(patience))
			b := make([]byte, 100)
			must.OK(t, must.Err(io.WriteString(c, "ping")))
			if n, err := c.Read(b); err != nil || !strings.HasSuffix(string(b[:n]), "ping") {
				t.Fatalf("%s: %q, %v", network, b[:n], err)
			}
		}
	}
	first.leave()
	for range 10 {
		echo()
	}
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	check.Equalf(t, next.server.Stats().Open, 2, "flows were adopted")
	echo()
	_ = open["tcp"].Close()
	wait.True(t, "the connection has ended", func() bool { return len(next.taken()) == 1 })
	next.stop()
	check.Equalf(t, len(first.taken()), 0, "records of flows that went on")
	records := next.taken()
	if len(records) != 2 || records[0].End != conntrack.ClientFin || records[0].BytesFromClient != 6+11*4 || records[0].Source != policy.SourceClient {
		t.Errorf("%+v", records)
	}
	if _, err := lab.Node.Netlink().LinkByName("test"); err == nil {
		t.Error("the device is there after the stop")
	}
}

// New connections of the node's own clients are relayed while something looks at their packets, or
// an endpoint is on the node. NodeRelayed says why.
func TestNodeClientsAreRelayed(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Node.EchoTCPAt(t, vip4+":80") // the relay
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	asks := func(want string) {
		t.Helper()
		if said, err := lab.Node.Ask("tcp", vip4+":80"); err != nil || said != want {
			t.Errorf("%q, %v; want %q", said, err, want)
		}
	}
	relayed := func(because string) {
		t.Helper()
		wait.For(t, "relayed because of "+because, patience, func() error {
			if why := n.server.NodeRelayed(); !strings.Contains(why, because) {
				return fmt.Errorf("%q", why)
			}
			return nil
		})
	}
	nft := func(script string) func() { return func() { lab.Node.NFT(t, script) } }
	drops := func(family, hook string) func() {
		return nft(fmt.Sprintf("table %s other {\nchain c {\ntype filter hook %s priority 0\nth dport 9 drop\n}\n}", family, hook))
	}
	sourceCheck := func(value string) func() {
		return func() {
			must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/all/rp_filter", value))
		}
	}
	attached := make(chan link.Link, 1)
	attach := func(ifname string, where ebpf.AttachType) func() {
		return func() {
			l := foreign.Idle(t)
			must.OK(t, lab.Node.Do(func() error {
				at, err := link.AttachTCX(link.TCXOptions{Interface: lab.Node.Link(t, ifname).Attrs().Index, Program: l, Attach: where})
				attached <- at
				return err
			}))
		}
	}
	detach := func() { _ = (<-attached).Close() }
	for _, c := range []struct {
		because  string
		do, undo func()
	}{
		{"the chain c of nftables' table other", drops("inet", "output"), nft("delete table inet other")},
		{"the chain c of nftables' table other", drops("ip", "input"), nft("delete table ip other")},
		{"the chain c of nftables' table other", drops("ip6", "postrouting"), nft("delete table ip6 other")},
		{"all.rp_filter is 1", sourceCheck("1"), sourceCheck("0")},
		{"another program at lo's egress", attach("lo", ebpf.AttachTCXEgress), detach},
	} {
		n.servesNode()
		asks("b1:8080")
		c.do()
		relayed(c.because)
		asks("node:80")
		c.undo()
	}
	n.servesNode()
	asks("b1:8080")
	check.Equalf(t, n.say(n.dialFrom("tcp", netip.MustParseAddr("127.0.0.1"), netip.MustParseAddrPort(vip4+":80"))), "node:80", "a client at a loopback address")
	n.apply(svc(vip4, nil, at(lab.Node.IPv4, 8080)))
	asks("node:80")
}

// Loose checks of sources at all interfaces let the answers pass.
func TestNodeClientsBesideLooseSourceChecks(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/all/rp_filter", "2"))
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	n.servesNode()
	check.Equal(t, must.Get(lab.Node.Ask("tcp", vip4+":80"))(t), "b1:8080")
}

// Bytes arrive complete and in order both ways, also where the path's MTU is smaller than what the
// client's socket and the endpoint's believe.
func TestNodeClientsAndThePathMTU(t *testing.T) {
	t.Parallel()
	for _, vip := range []string{vip4, vip6} {
		t.Run(vip, func(t *testing.T) {
			lab := localNode(t, 1)
			endpoint, own := at(lab.Backends[0].IPv4, 8080), lab.Node.IPv4
			if vip == vip6 {
				endpoint, own = at(lab.Backends[0].IPv6, 8080), lab.Node.IPv6
			}
			lab.Backends[0].EchoTCP(t, 8080)
			lab.Backends[0].EchoUDP(t, 8080)
			dst := &net.IPNet{IP: endpoint.Addr().AsSlice(), Mask: net.CIDRMask(endpoint.Addr().BitLen(), endpoint.Addr().BitLen())}
			must.OK(t, lab.Node.Netlink().RouteAdd(&netlink.Route{Dst: dst, LinkIndex: lab.Node.Link(t, "b1").Attrs().Index, MTU: 1300}))
			n := newNode(t, lab, nil)
			n.apply(svc(vip, nil, endpoint))
			n.servesNode()
			c := n.dialFrom("tcp", own, at(netip.MustParseAddr(vip), 80)).(*net.TCPConn)
			sent := make([]byte, 4<<20)
			for i := range sent {
				sent[i] = byte(i * i >> 8)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			go func() {
				_, _ = c.Write(sent)
				_ = c.CloseWrite()
			}()
			r := bufio.NewReader(c)
			must.OK(t, must.Err(r.ReadString('\n')))
			if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, sent) {
				t.Errorf("%d bytes of %d came back, %v", len(got), len(sent), err)
			}
			if vip == vip4 {
				d := n.dialFrom("udp", own, at(netip.MustParseAddr(vip), 80))
				for _, size := range []int{1, 1272, 1273, 5000, 60000} {
					_ = d.SetDeadline(time.Now().Add(patience))
					got := make([]byte, 65536)
					length, err := d.Write(sent[:size])
					if err == nil {
						length, err = d.Read(got)
					}
					if _, echo, _ := bytes.Cut(got[:length], []byte("\n")); err != nil || !bytes.Equal(echo, sent[:size]) {
						t.Errorf("a datagram of %d bytes came back as %d, %v", size, length, err)
					}
				}
			}
			wait.True(t, "a record", func() bool { return len(n.taken()) == 1 })
			if r := n.taken()[0]; r.Path != conntrack.Kernel || r.BytesFromClient != uint64(len(sent)) || r.BytesFromEndpoint < uint64(len(sent)) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// A socket of the node that asks the endpoint itself by a port that a client on the node has there is
// answered, and so is the client.
func TestNodeAsksAnEndpointByANodeClientsPort(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	endpoint := at(lab.Backends[0].IPv4, 8080)
	lab.Backends[0].WitnessTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, endpoint))
	n.servesNode()
	const port = 45000
	c := dialFrom(t, lab.Node, port, vip4+":80")
	_, peer, _ := strings.Cut(n.say(c), " ")
	direct := dialFrom(t, lab.Node, port, endpoint.String())
	if said := n.say(direct); said == "b1:8080 "+peer || !strings.HasPrefix(said, "b1:8080 ") {
		t.Errorf("the endpoint answered %q to the node's own connection, and saw %s before", said, peer)
	}
	must.OK(t, must.Err(io.WriteString(c, "again")))
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "again" {
		t.Errorf("%q, %v", b, err)
	}
}

// Endpoints behind a bridge, and behind an interface without a link header, such as WireGuard's, answer
// the node's own clients, and see one port of each.
func TestNodeClientsOfEndpointsBehindOtherLinks(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"bridge", "bare"} {
		for _, network := range []string{"tcp", "udp"} {
			for _, vip := range []string{vip4, vip6} {
				if network == "udp" && vip == vip6 {
					continue // the relay's
				}
				t.Run(kind+" "+network+" "+vip, func(t *testing.T) {
					lab := localNode(t, 1)
					h := lab.Backends[0]
					if kind == "bridge" {
						putBehindBridge(t, lab.Node, h.Name())
					} else {
						h = lab.AddFarHost(t, "far", 1, netns.Line{MTU: 1400})
					}
					h.WitnessTCP(t, 8080)
					h.WitnessUDP(t, 8080)
					endpoint, own := at(h.IPv4, 8080), lab.Node.IPv4
					if vip == vip6 {
						endpoint, own = at(h.IPv6, 8080), lab.Node.IPv6
					}
					n := newNode(t, lab, nil)
					n.apply(svc(vip, nil, endpoint))
					n.servesNode()
					for range 5 {
						c := n.dialFrom(network, own, at(netip.MustParseAddr(vip), 80))
						said := n.say(c)
						server, peer, _ := strings.Cut(said, " ")
						if seen, err := netip.ParseAddrPort(peer); err != nil || server != h.Name()+":8080" || !isPortOf(c, seen.Port()) {
							t.Errorf("%q to %s", said, c.LocalAddr())
						}
						for range 3 {
							if network == "tcp" {
								break
							}
							check.Equalf(t, n.say(c), said, "what it says again")
						}
						_ = c.Close()
					}
				})
			}
		}
	}
}

// putBehindBridge makes an interface of the node's the port of a bridge that has its addresses.
func putBehindBridge(t *testing.T, node *netns.Host, ifname string) {
	t.Helper()
	nl, bridge := node.Netlink(), &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bridge"}}
	must.OK(t, errors.Join(nl.LinkAdd(bridge), nl.LinkSetUp(bridge), nl.LinkSetMaster(node.Link(t, ifname), bridge)))
	moveAddresses(t, node, ifname, "bridge")
}

// moveAddresses gives an interface of the node's the addresses of another one.
func moveAddresses(t *testing.T, node *netns.Host, from, to string) {
	t.Helper()
	nl, was, is := node.Netlink(), node.Link(t, from), node.Link(t, to)
	addrs, err := nl.AddrList(was, netlink.FAMILY_ALL)
	for _, a := range addrs {
		if a.IP.IsLinkLocalUnicast() {
			continue
		}
		add := &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD}
		err = errors.Join(err, nl.AddrDel(was, &a), nl.AddrAdd(is, add))
	}
	must.OK(t, err)
}

// The device comes again if another program removes it, or sets it down.
func TestNodeClientsGetTheirDeviceAgain(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	n.servesNode()
	c := n.dialFrom("tcp", lab.Node.IPv4, netip.MustParseAddrPort(vip4+":80"))
	n.say(c)
	nl := lab.Node.Netlink()
	for what, change := range map[string]func(netlink.Link) error{"removed": nl.LinkDel, "down": nl.LinkSetDown} {
		must.OK(t, change(lab.Node.Link(t, "sluice")))
		wait.For(t, what+": the kernel forwards by it again", patience, func() error {
			l, err := nl.LinkByName("sluice")
			if err == nil && l.Attrs().Flags&net.FlagUp == 0 {
				err = errors.New("it is down")
			}
			if err != nil {
				return err
			}
			said, err := lab.Node.Ask("tcp", vip4+":80")
			if err == nil && said != "b1:8080" {
				err = errors.New(said)
			}
			return err
		})
		_, err := io.WriteString(c, "again")
		must.OK(t, err)
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "again" {
			t.Errorf("%s: an open connection: %q, %v", what, b, err)
		}
	}
}

// Of many connections of the node's own clients beside a dead endpoint, none fails, and each leaves one
// record.
func TestNodeClientsBesideADeadEndpoint(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 2)
	lab.Backends[1].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
	n.servesNode()
	const connections = 1000
	for range connections {
		must.Equal(t, must.Get(lab.Node.Ask("tcp", vip4+":80"))(t), "b2:8080")
	}
	wait.True(t, "all connections have ended", func() bool { return len(n.taken()) >= connections && !n.hasOpenFlow() })
	failed := 0
	records := n.taken()
	for _, r := range records {
		failed += len(r.Failed)
	}
	if len(records) != connections || failed == 0 {
		t.Errorf("%d records of %d connections, with %d failed attempts", len(records), connections, failed)
	}
}
