//go:build cluster

package cluster

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Offsets in a TCP header, and flags (RFC 9293, section 3.1).
const (
	tcpSource, tcpTarget, tcpSeq, tcpAck = 0, 2, 4, 8
	tcpFlags, tcpWindow, tcpSum          = 13, 14, 16
	tcpHeader                            = 20
	flagPush, flagAck                    = 8, 16
)

// staleSegment waits on a raw socket of the server's host for a segment from the
// client, and builds a reply with very old bytes. Connection tracking calls it
// invalid and does not translate it, so that a client behind NAT gets a segment of
// an unknown connection, and resets it (kubernetes/kubernetes#74839).
func staleSegment(raw net.PacketConn, server, client netip.AddrPort) ([]byte, error) {
	_ = raw.SetReadDeadline(time.Now().Add(patience))
	in := make([]byte, 65536)
	for {
		n, _, err := raw.ReadFrom(in)
		if err != nil {
			return nil, fmt.Errorf("no segment from %s: %w", client, err)
		}
		if n < tcpHeader || in[tcpFlags]&flagAck == 0 || binary.BigEndian.Uint16(in[tcpSource:]) != client.Port() ||
			binary.BigEndian.Uint16(in[tcpTarget:]) != server.Port() {
			continue
		}
		out := append(make([]byte, tcpHeader), "boom"...)
		binary.BigEndian.PutUint16(out[tcpSource:], server.Port())
		binary.BigEndian.PutUint16(out[tcpTarget:], client.Port())
		binary.BigEndian.PutUint32(out[tcpSeq:], binary.BigEndian.Uint32(in[tcpAck:])-100000)
		binary.BigEndian.PutUint32(out[tcpAck:], binary.BigEndian.Uint32(in[tcpSeq:]))
		out[12] = tcpHeader / 4 << 4 // the header's length in words
		out[tcpFlags] = flagPush | flagAck
		binary.BigEndian.PutUint16(out[tcpWindow:], 65535)
		binary.BigEndian.PutUint16(out[tcpSum:], tcpChecksum(server.Addr(), client.Addr(), out))
		return out, nil
	}
}

// tcpChecksum is that of RFC 9293 for IPv4.
func tcpChecksum(from, to netip.Addr, segment []byte) uint16 {
	pseudo := append(append(from.AsSlice(), to.AsSlice()...), 0, 6, 0, byte(len(segment)))
	var sum uint32
	for _, part := range [][]byte{pseudo, segment} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// echoes expects a line back on a connection to an echo server.
func echoes(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	const line = "still there?\n"
	if _, err := c.Write([]byte(line)); err != nil {
		return err
	}
	back, err := bufio.NewReaderSize(c, 64).ReadString('\n')
	if err == nil && back != line {
		err = errors.New("got " + back)
	}
	return err
}
