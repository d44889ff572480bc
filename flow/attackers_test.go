package flow

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// attacker sends anything with any source address but its own. The node drops all of it, behind
// the programs at ingress.
type attacker struct {
	*rand.Rand
	host  *netns.Host
	fd    int
	addrs []netip.Addr // of the victim, the endpoints, the Services, the node
	ports []uint16     // of the victim, the endpoints, the Services
	new   []uint16     // of the victim's, whose sessions have not begun
	own   netip.Addr   // a Service of the attacker's, with the victim's endpoint
}

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

func (a *attacker) port() uint16 {
	if a.IntN(8) == 0 {
		return uint16(1024 + a.IntN(64512))
	}
	return pick(a.Rand, a.ports)
}

// datagram is a UDP datagram, whole or the first or a later fragment.
func (a *attacker) datagram(from, to netip.AddrPort) []byte {
	payload := make([]byte, 8*a.IntN(8))
	p := appendIP(nil, from.Addr(), to.Addr(), syscall.IPPROTO_UDP, byte(8+len(payload)))
	// A fragment would have the relay serve a session that has not begun, and here is none.
	kind := a.IntN(8)
	if slices.Contains(a.new, from.Port()) || !slices.Contains(a.ports, from.Port()) {
		kind = 2
	}
	switch kind {
	case 0:
		binary.BigEndian.PutUint16(p[6:], 0x2000) // more fragments follow
	case 1:
		binary.BigEndian.PutUint16(p[6:], 1+uint16(a.IntN(100)))
	}
	p = binary.BigEndian.AppendUint16(p, from.Port())
	p = binary.BigEndian.AppendUint16(p, to.Port())
	p = binary.BigEndian.AppendUint16(p, uint16(8+len(payload)))
	return append(append(p, 0, 0), payload...) // without a checksum
}

// refusal is an ICMP error about a packet that was, or was not, sent.
func (a *attacker) refusal(src netip.Addr, from, to netip.AddrPort) []byte {
	quoted := appendIP(nil, to.Addr(), from.Addr(), pick(a.Rand, []byte{syscall.IPPROTO_TCP, syscall.IPPROTO_UDP}), byte(a.IntN(64)))
	quoted = binary.BigEndian.AppendUint16(quoted, to.Port())
	quoted = binary.BigEndian.AppendUint16(quoted, from.Port())
	quoted = binary.BigEndian.AppendUint32(quoted, a.Uint32()>>(16*a.IntN(2)))
	b := append([]byte{pick(a.Rand, []byte{3, 11, 12}), byte(a.IntN(5)), 0, 0, 0, 0, 0, 0}, quoted...)
	binary.BigEndian.PutUint16(b[2:], ^folded(sum(0, b)))
	return append(appendIP(nil, src, to.Addr(), syscall.IPPROTO_ICMP, byte(len(b))), b...)
}

// send sends a packet.
func (a *attacker) send() error {
	from, to := netip.AddrPortFrom(pick(a.Rand, a.addrs), a.port()), netip.AddrPortFrom(pick(a.Rand, a.addrs), a.port())
	if a.IntN(4) == 0 {
		to = netip.AddrPortFrom(a.own, 80)
	}
	var p []byte
	switch a.IntN(6) {
	case 0, 1:
		p = a.datagram(from, to)
	case 2:
		p = a.refusal(pick(a.Rand, a.addrs), from, to)
	default:
		s := reset{from: from, to: to, sequence: a.Uint32(), ack: a.Uint32(), flags: pick(a.Rand, []byte{flagSYN, flagSYN | flagACK, flagRST, flagRST | flagACK, flagACK, flagACK | 1})}
		p = s.append(nil)
	}
	if errno := sys.SendRaw(a.fd, to.Addr(), p); errno != 0 && errno != syscall.ENOBUFS {
		return errno
	}
	return nil
}

// TestAttackersChangeNothing has a host send thousands of random packets in the names of others,
// which the node's rules drop in netfilter's raw hooks. Meanwhile a client's open connections and
// sessions go on as they are, and new ones are served; as with kernel DNAT, which is played too.
func TestAttackersChangeNothing(t *testing.T) {
	netns.Require(t)
	for _, path := range []string{"dnat", "flows"} {
		for _, masquerade := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/masquerade=%v", path, masquerade), func(t *testing.T) {
				t.Parallel()
				c := &policyNet{Cluster: netns.NewCluster(t)}
				for _, h := range []*netns.Host{c.Pods[1], c.Remote[0]} {
					h.WitnessTCP(t, 8080)
					h.WitnessUDP(t, 8080)
				}
				// Rules that come later miss the shortcuts of a quarter of a second.
				c.Node.NFT(t, fmt.Sprintf("table ip forged {\nchain raw {\ntype filter hook prerouting priority raw\niifname %q ip saddr != %s drop\n}\n}\n", c.World.Name(), c.World.IPv4))
				own := netip.MustParseAddr("10.96.0.12")
				if path == "dnat" {
					c.dnat(t, masquerade)
				} else {
					c.flows(t, masquerade).apply(named("attackers", svc(own.String(), nil, at(c.addr(c.Pods[1]), 8080))))
				}
				c.attacked(t, own)
			})
		}
	}
}

// attacked attacks a client of both Services.
func (c *policyNet) attacked(t *testing.T, own netip.Addr) {
	seed := rand.Uint64()
	vips := policyVIPs[false]
	a := &attacker{
		Rand: rand.New(rand.NewPCG(seed, 1)), host: c.World, own: own,
		addrs: []netip.Addr{c.Pods[0].IPv4, c.Pods[0].IPv4, c.Pods[1].IPv4, c.Remote[0].IPv4, c.Node.IPv4, netip.MustParseAddr(vips[0]), netip.MustParseAddr(vips[1])},
		ports: []uint16{80, 8080},
	}
	must.OK(t, c.World.Do(func() (err error) {
		a.fd, err = sys.RawSender(false)
		return err
	}))
	defer sys.Close(a.fd)
	type held struct {
		net.Conn
		name, said string
	}
	var open []*held
	dial := func(network, address string) *held {
		t.Helper()
		conn, err := c.Pods[0].Dialer(&net.Dialer{Timeout: patience}, network, address)
		must.OKf(t, err, "seed %d: %s to %s", seed, network, address)
		t.Cleanup(func() { _ = conn.Close() })
		a.ports = append(a.ports, netip.MustParseAddrPort(conn.LocalAddr().String()).Port())
		return &held{Conn: conn, name: network + " from " + conn.LocalAddr().String() + " to " + address}
	}
	ask := func(h *held) string {
		t.Helper()
		_ = h.SetDeadline(time.Now().Add(patience))
		said, err := line(h)
		must.OKf(t, err, "seed %d: %s", seed, h.name)
		return said
	}
	services := []string{net.JoinHostPort(vips[0], "80"), net.JoinHostPort(vips[1], "80")}
	direct := net.JoinHostPort(c.Pods[1].IPv4.String(), "8080") // the endpoint of the attacker's Service too
	for i := range 9 {
		h := dial([]string{"tcp", "udp", "udp"}[i%3], []string{services[0], services[1], direct}[i%3])
		h.said = ask(h)
		open = append(open, h)
	}
	for range 10 {
		// These are attacked before their first packet.
		var coming []*held
		a.new = nil
		for _, s := range services {
			coming = append(coming, dial("udp", s))
			a.new = append(a.new, a.ports[len(a.ports)-1])
		}
		for range 600 {
			must.OK(t, a.send())
		}
		for _, h := range open {
			// Servers say once for each TCP connection who they are, and whom they see.
			if said := ask(h); said != h.said && h.LocalAddr().Network() == "udp" {
				t.Errorf("seed %d: %s: %q, before the attack %q", seed, h.name, said, h.said)
			}
		}
		for i, s := range services {
			for _, h := range []*held{coming[i], dial("tcp", s)} {
				ask(h)
			}
		}
	}
}
