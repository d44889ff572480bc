package iptables

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Data passes most rules by. What belongs to no connection is turned away all
// the same, by what the address says, and not by the host's own servers (F4).
func TestDataOfNoConnection(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := newLab(t)
		lab.Node.EchoTCP(t, 80) // would answer with a reset
		f := steering.NewFront(t, lab.Node, "front")
		r := newOne(t, lab.Node, opts)
		for _, p := range []redirect.Plan{
			steering.Plan(steering.Steer(f, tcp("10.96.0.10:80")), steering.Silent(tcp("10.96.0.12:80"))),
			steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"), tcp("192.0.2.1:80")), steering.Silent(tcp("10.96.0.12:80"))),
		} {
			apply(t, r, p)
			for _, c := range []struct{ to, want string }{
				{"10.96.0.10:80", "reset"},
				{"10.96.0.10:81", "reset"}, // A3.12
				{"10.96.0.12:80", steering.Silence},
				{"10.96.0.99:80", steering.Silence},
				{"10.1.0.1:80", "reset"}, // the server
			} {
				check.Equalf(t, sendData(t, lab.Client, netip.MustParseAddrPort(c.to), patienceFor(c.want)), c.want, "%d foreign addresses: to %s", p.NonLocal.Len(), c.to)
			}
		}
	})
}

// sendData sends a segment with data, as of an established connection, and tells
// what comes back in some time: "reset" or steering.Silence.
func sendData(t *testing.T, from *netns.Host, to netip.AddrPort, patience time.Duration) string {
	t.Helper()
	var raw *net.IPConn
	err := from.Do(func() (err error) {
		raw, err = net.DialIP("ip4:tcp", nil, &net.IPAddr{IP: to.Addr().AsSlice()})
		return err
	})
	must.OK(t, err)
	defer raw.Close()
	const port = 9999
	const pshAck = 0x18
	s := make([]byte, 20, 24)
	binary.BigEndian.PutUint16(s[0:], port)
	binary.BigEndian.PutUint16(s[2:], to.Port())
	binary.BigEndian.PutUint32(s[4:], 1000) // sequence
	binary.BigEndian.PutUint32(s[8:], 1000) // acknowledgement
	s[12], s[13] = 5<<4, pshAck
	binary.BigEndian.PutUint16(s[14:], 1000) // window
	s = append(s, "data"...)
	binary.BigEndian.PutUint16(s[16:], checksum(from.IPv4, to.Addr(), s))
	must.OK(t, must.Err(raw.Write(s)))
	_ = raw.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 100)
	for {
		n, _, err := raw.ReadFromIP(buf)
		if err != nil {
			return steering.Silence
		}
		const rst = 0x04
		if answer := buf[:n]; n >= 20 && binary.BigEndian.Uint16(answer) == to.Port() &&
			binary.BigEndian.Uint16(answer[2:]) == port && answer[13]&rst != 0 {
			return "reset"
		}
	}
}

// checksum is TCP's.
func checksum(from, to netip.Addr, segment []byte) uint16 {
	const tcp = 6
	sum := uint32(tcp) + uint32(len(segment))
	add := func(b []byte) {
		for ; len(b) > 1; b = b[2:] {
			sum += uint32(b[0])<<8 | uint32(b[1])
		}
	}
	add(from.AsSlice())
	add(to.AsSlice())
	add(segment)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
