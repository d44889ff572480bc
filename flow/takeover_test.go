package flow

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// sendAs sends a datagram from a host with any source address.
func sendAs(t *testing.T, h *netns.Host, from, to netip.AddrPort, payload string) {
	t.Helper()
	b := appendIP(nil, from.Addr(), to.Addr(), syscall.IPPROTO_UDP, byte(8+len(payload)))
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	b = append(append(b, 0, 0), payload...)
	if err := h.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		if errno := sys.SendRaw(fd, to.Addr(), b); errno != 0 {
			return errno
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// A host cannot take a session of another one over, if the node drops what it sends in that
// one's name: neither one with an endpoint itself, by a Service of its own with that endpoint,
// nor one with a Service, by the endpoint's address.
func TestForgedDatagramsTakeNoSession(t *testing.T) {
	t.Run("endpoint in a pod", func(t *testing.T) { testForgedDatagrams(t, false) })
	t.Run("endpoint on the node", func(t *testing.T) { testForgedDatagrams(t, true) })
}

func testForgedDatagrams(t *testing.T, onNode bool) {
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		victim, attacker, server := lab.Client, lab.Backends[1], lab.Backends[0]
		if onNode {
			server = lab.Node
		}
		server.WitnessUDP(t, 8080)
		endpoint := at(server.IPv4, 8080)
		lab.Node.NFT(t, fmt.Sprintf("add table inet guard; add chain inet guard raw { type filter hook prerouting priority raw; }; add rule inet guard raw iifname != client ip saddr %s counter drop", victim.IPv4))
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, endpoint))
		n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
		own, service, attackers := netip.AddrPortFrom(victim.IPv4, 41000), netip.MustParseAddrPort(vip4+":80"), netip.MustParseAddrPort("10.96.0.11:80")
		for _, to := range []netip.AddrPort{endpoint, service} {
			own = netip.AddrPortFrom(own.Addr(), own.Port()+1)
			socket := must.Get(victim.ListenPacket("udp4", own.String()))(t)
			defer socket.Close()
			seen := ""
			for i := range 3 {
				if _, err := socket.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(to)); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 1<<10)
				_ = socket.SetReadDeadline(time.Now().Add(patience))
				size, from, err := socket.ReadFrom(b)
				if err != nil || from.String() != to.String() {
					t.Fatalf("question %d to %v: an answer of %v, %v", i, to, from, err)
				}
				said, _, _ := strings.Cut(string(b[:size]), "\n")
				if seen != "" && said != seen {
					t.Errorf("question %d to %v: the endpoint saw %q, and before %q", i, to, said, seen)
				}
				seen = said
				had := n.server.Stats().Kernel["translated"]
				sendAs(t, attacker, own, attackers, "forged")
				wait.True(t, "the forged datagram", func() bool { return n.server.Stats().Kernel["translated"] > had })
				sendAs(t, attacker, own, endpoint, "forged")
				sendAs(t, attacker, own, service, "forged")
			}
		}
	})
}

// An endpoint on the node itself may answer by another interface than the question came by: its
// client gets the answer from where it has asked.
func TestAnswerByAnotherInterface(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Node.WitnessUDP(t, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, at(lab.Node.IPv4, 8080)))
		socket := must.Get(lab.Client.ListenPacket("udp4", lab.Client.IPv4.String()+":41000"))(t)
		defer socket.Close()
		service := netip.MustParseAddrPort(vip4 + ":80")
		for i := range 3 {
			said := fmt.Sprint("question ", i)
			sendAs(t, lab.Backends[0], at(lab.Client.IPv4, 41000), service, said)
			b := make([]byte, 1<<10)
			_ = socket.SetReadDeadline(time.Now().Add(patience))
			for {
				size, from, err := socket.ReadFrom(b)
				must.OK(t, err)
				if from.String() == service.String() && strings.HasSuffix(string(b[:size]), said) {
					break
				}
			}
		}
	})
}
