package netns

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// pingPatience bounds Ping: hosts in a lab answer within milliseconds, or later on
// a busy machine.
const pingPatience = 5 * time.Second

// Ping sends an ICMP echo request from inside the namespace and waits for the
// reply.
func (n *Namespace) Ping(to netip.Addr) error {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	c, err := n.Dial(network, to.String())
	if err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
	}
	defer c.Close()
	const identifier, sequence = 0x5183, 1
	echo := []byte{request, 0, 0, 0}
	echo = binary.BigEndian.AppendUint16(echo, identifier)
	echo = binary.BigEndian.AppendUint16(echo, sequence)
	if to.Is4() { // the kernel fills in IPv6's
		binary.BigEndian.PutUint16(echo[2:], checksum(echo))
	}
	if _, err := c.Write(echo); err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(pingPatience)); err != nil {
		return err
	}
	for buf := make([]byte, 128); ; {
		k, _, err := c.(*net.IPConn).ReadFrom(buf) // without the header, unlike Read
		if err != nil {
			return fmt.Errorf("ping %s: %w", to, err)
		}
		if k >= 8 && buf[0] == reply && binary.BigEndian.Uint16(buf[4:]) == identifier {
			return nil
		}
	}
}

// checksum is the Internet checksum of a message of even length (RFC 1071).
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	return ^uint16(sum + sum>>16)
}
