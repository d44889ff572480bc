package flow

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// refusal is an ICMP error about a datagram of a session. Its sender knows the addresses and ports.
type refusal struct {
	from   netip.Addr
	code   byte   // of ICMP's destination unreachable
	length uint16 // of the datagram, as the error quotes it
}

// checkBehind is the checksum of a session's last datagram as the endpoint got it, if the client's
// was complete.
func checkBehind(k *bpf.KernelFlow, seen, endpoint netip.AddrPort) uint16 {
	words := func(a, b netip.AddrPort) []byte {
		w := append(a.Addr().AsSlice(), b.Addr().AsSlice()...)
		return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(w, a.Port()), b.Port())
	}
	was := words(bpf.PortOf(k.Client, k.ClientPort), bpf.PortOf(k.Vip, k.VipPort))
	for i := range was {
		was[i] = ^was[i]
	}
	rest := binary.BigEndian.AppendUint16(was, ^uint16(k.Way[0].End))
	return ^folded(sum(0, append(rest, words(seen, endpoint)...)))
}

// send sends the error from a host to where the session's endpoint would send it.
func (r *refusal) send(t *testing.T, h *netns.Host, k *bpf.KernelFlow) {
	t.Helper()
	seen := bpf.PortOf(k.Client, k.MiddlePort)
	if k.Options&bpf.KernelOptionOPTION_MASQUERADE != 0 {
		seen = bpf.PortOf(k.Node, k.NodePort)
	}
	endpoint := bpf.PortOf(k.Endpoint, k.EndpointPort)
	quoted := appendIP(nil, seen.Addr(), endpoint.Addr(), syscall.IPPROTO_UDP, byte(r.length))
	quoted = binary.BigEndian.AppendUint16(quoted, seen.Port())
	quoted = binary.BigEndian.AppendUint16(quoted, endpoint.Port())
	quoted = binary.BigEndian.AppendUint16(quoted, r.length)
	quoted = binary.BigEndian.AppendUint16(quoted, checkBehind(k, seen, endpoint))
	ipv6, kind, protocol, pseudo := seen.Addr().Is6(), byte(3), byte(syscall.IPPROTO_ICMP), uint32(0)
	if ipv6 {
		kind, protocol = 1, syscall.IPPROTO_ICMPV6
		pseudo = sum(uint32(8+len(quoted))+uint32(protocol), append(r.from.AsSlice(), seen.Addr().AsSlice()...))
	}
	b := append([]byte{kind, r.code, 0, 0, 0, 0, 0, 0}, quoted...)
	binary.BigEndian.PutUint16(b[2:], ^folded(sum(pseudo, b)))
	packet := append(appendIP(nil, r.from, seen.Addr(), protocol, byte(len(b))), b...)
	must.OK(t, h.Do(func() error {
		fd, err := sys.RawSender(ipv6)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		if errno := sys.SendRaw(fd, seen.Addr(), packet); errno != 0 {
			return errno
		}
		return nil
	}))
}

// An attacker cannot move a session, answered or not, by an ICMP error about a datagram that he has
// not seen. A refusal of a sent datagram is believed.
func TestForgedRefusalMovesNoSession(t *testing.T) {
	t.Parallel()
	for _, vip := range []string{vip4, vip6} {
		for _, hidden := range []bool{false, true} {
			for _, answered := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/hidden=%t/answered=%t", vip, hidden, answered), func(t *testing.T) {
					testForgedRefusals(t, vip, hidden, answered)
				})
			}
		}
	}
}

func testForgedRefusals(t *testing.T, vip string, hidden, answered bool) {
	lab := netns.NewLab(t, 2)
	address := func(h *netns.Host) netip.Addr {
		if vip == vip6 {
			return h.IPv6
		}
		return h.IPv4
	}
	if answered {
		lab.Backends[0].EchoUDP(t, 8080)
	} else {
		silent := must.Get(lab.Backends[0].ListenPacket("udp", ":8080"))(t)
		defer silent.Close()
	}
	n := newNode(t, lab, nil)
	n.config.MasqueradeAll = hidden
	// An endpoint that refuses late would be tried again.
	n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{1}, After: 1, Total: 1}
	n.apply(svc(vip, nil, at(address(lab.Backends[0]), 8080)))
	c, err := lab.Client.Dial("udp", net.JoinHostPort(vip, "80"))
	must.OK(t, err)
	defer c.Close()
	const datagram = 8 + 4 // "who?"
	if answered {
		_, err = question(c)
	} else {
		_, err = c.Write([]byte("who?"))
	}
	must.OK(t, err)
	var session *bpf.KernelFlow
	wait.True(t, "userspace knows the session", func() bool {
		n.onLoop(func() {
			for _, f := range n.server.worker.flows {
				if f != nil && f.shared().Way[0].End>>16 == datagram {
					session = f.shared()
				}
			}
		})
		return session != nil
	})
	endpoint, other := address(lab.Backends[0]), lab.Backends[1]
	errors := func() uint64 { return n.server.Stats().Kernel["icmp_errors"] }
	host, port := byte(1), byte(3)
	if vip == vip6 {
		host, port = 3, 4
	}
	forged := []refusal{
		{endpoint, port, 8}, {endpoint, port, 8 + 2}, {endpoint, port, 8 + 8}, {endpoint, port, 0},
		{address(other), port, datagram}, {address(other), port, 8},
	}
	if !answered {
		forged = append(forged, refusal{endpoint, host, datagram}, refusal{address(other), host, datagram})
	}
	for _, r := range forged {
		before := errors()
		r.send(t, other, session)
		wait.True(t, "BPF sees the error", func() bool { return errors() > before })
	}
	told := n.server.Stats().Kernel["refused"]
	n.onLoop(func() { n.server.worker.HandleEvents(0, 0) })
	if state := atomic.LoadUint32((*uint32)(&session.State)); told != 0 || len(n.taken()) > 0 || state == uint32(bpf.KernelStateMOVING) {
		t.Errorf("believed: %d refusals, records %+v", told, n.taken())
	}
	(&refusal{endpoint, port, datagram}).send(t, other, session)
	wait.True(t, "a refusal that quotes what was sent ends the session", func() bool { return len(n.taken()) == 1 })
}
