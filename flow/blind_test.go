package flow

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// sendSegment sends a segment with one byte, or an RST, from a host with any source address.
func sendSegment(t *testing.T, h *netns.Host, from, to netip.AddrPort, sequence, ack uint32, flags byte) {
	t.Helper()
	payload := []byte("x")
	if flags&flagRST != 0 {
		payload = nil
	}
	b := appendIP(nil, from.Addr(), to.Addr(), syscall.IPPROTO_TCP, byte(tcpHeader+len(payload)))
	tcp := len(b)
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint32(b, sequence)
	b = binary.BigEndian.AppendUint32(b, ack)
	b = append(append(b, tcpHeader/4<<4, flags, 0xff, 0xff, 0, 0, 0, 0), payload...)
	binary.BigEndian.PutUint16(b[tcp+tcpChecksum:], checksum(pseudoSum(b, false, syscall.IPPROTO_TCP, len(b)-tcp), b[tcp:]))
	must.OK(t, h.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		if errno := sys.SendRaw(fd, to.Addr(), b); errno != 0 {
			return errno
		}
		return nil
	}))
}

// An attacker who knows all of a connection but its sequence numbers cannot end it, whether the node
// drops the forged packets or the endpoint judges them. Segments outside of the window do not delay
// the record.
func TestBlindResetEndsNoConnection(t *testing.T) {
	t.Parallel()
	for _, guarded := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 2)
			lab.Backends[0].EchoTCP(t, 8080)
			if guarded {
				lab.Node.NFT(t, fmt.Sprintf("add table inet guard; add chain inet guard raw { type filter hook prerouting priority raw; }; add rule inet guard raw iifname != client ip saddr %s counter drop", lab.Client.IPv4))
			}
			n := newNode(t, lab, by)
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
			defer c.Close()
			must.OK(t, must.Err(netns.AskOn(c)))
			wait.True(t, "the flow is open", n.hasOpenFlow)
			client, vip := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(vip4+":80")
			k := n.openFlow()
			// Places without a real sequence number: any other would be a correct guess.
			first := k.Way[0].End + 1<<28
			had := n.server.Stats().Kernel["translated"]
			for round := range uint32(9) {
				for place := range uint32(8) {
					at := first + place<<29 + round<<16
					sendSegment(t, lab.Backends[1], client, vip, at, k.Way[1].End, flagACK)
					sendSegment(t, lab.Backends[1], client, vip, at+1, 0, flagRST)
				}
			}
			wait.True(t, "all segments", func() bool { return n.server.Stats().Kernel["translated"] >= had+9*8*2 })
			if k.State != bpf.KernelStateOPEN || len(n.taken()) != 0 {
				t.Errorf("guarded %v: the flow is in state %d, records: %+v", guarded, k.State, n.taken())
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			back := make([]byte, 6)
			if _, err := io.WriteString(c, "again\n"); err != nil {
				t.Errorf("guarded %v: %v", guarded, err)
			} else if _, err := io.ReadFull(c, back); err != nil || string(back) != "again\n" {
				t.Errorf("guarded %v: %q, %v", guarded, back, err)
			}
			_ = c.Close()
			wait.True(t, "a record", func() bool { return len(n.taken()) == 1 })
			if r := n.taken()[0]; r.End != conntrack.ClientFin || time.Duration(r.Duration) > patience {
				t.Errorf("guarded %v: %+v", guarded, r)
			}
		})
	}
}
