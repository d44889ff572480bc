package steering

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Reach's results other than a server's greeting.
const (
	Refused = "refused"
	Silence = "silence"
)

// silence is how long a client that expects no answer waits, and patience how long
// one that expects an answer.
const (
	silence  = 300 * time.Millisecond
	patience = 20 * time.Second
)

// Reach is the result of a client that connects, or sends a datagram, to a
// destination: a greeting, Refused, Silence, or an error's text. If Silence is
// expected, it waits for less time.
func Reach(t testing.TB, from *netns.Host, d service.Destination, want string) string {
	t.Helper()
	wait := patience
	if want == Silence {
		wait = silence
	}
	network, to := "tcp", netip.AddrPortFrom(d.Addr, d.Port).String()
	if d.Protocol == service.UDP {
		network = "udp"
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	var c net.Conn
	err := from.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, to)
		return err
	})
	if err != nil {
		return describe(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(wait))
	if network == "udp" {
		_, err := c.Write([]byte("hello"))
		if errors.Is(err, syscall.EPERM) { // netfilter refuses the node's own datagrams with EPERM
			return Refused
		}
		if err != nil {
			return describe(err)
		}
	}
	buf := make([]byte, 256)
	n, err := c.Read(buf)
	if err != nil {
		return describe(err)
	}
	name, _, _ := bytes.Cut(buf[:n], []byte{'\n'})
	return string(name)
}

// Expect fails the test if Reach is not as expected. when is what has been done.
func Expect(t testing.TB, from *netns.Host, d service.Destination, want string, when ...string) {
	t.Helper()
	check.Equalf(t, Reach(t, from, d, want), want, "%s: from %s to %s", when, from.Name(), d)
}

func describe(err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return Silence
	}
	return err.Error()
}

// Held is a connection that a client keeps.
type Held struct {
	net.Conn
	from string
	to   service.Destination
}

// Hold connects and reads the greeting.
func Hold(t testing.TB, from *netns.Host, d service.Destination) *Held {
	t.Helper()
	c, err := from.Dial("tcp", netip.AddrPortFrom(d.Addr, d.Port).String())
	must.OKf(t, err, "from %s", from.Name())
	return Keep(t, c, from.Name(), d)
}

// Keep is Hold for an existing connection.
func Keep(t testing.TB, c net.Conn, from string, d service.Destination) *Held {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() })
	must.OKf(t, must.Err(netns.AskOn(c)), "from %s to %s", from, d)
	return &Held{c, from, d}
}

// Works tells whether bytes still pass in both directions.
func (h *Held) Works(t testing.TB, when string) {
	t.Helper()
	sent, got := bytes.Repeat([]byte("all well? "), 100), make([]byte, 1000)
	_ = h.SetDeadline(time.Now().Add(patience))
	_, err := h.Write(sent)
	for n := 0; err == nil && n < len(got); {
		var m int
		m, err = h.Read(got[n:])
		n += m
	}
	if err != nil || !bytes.Equal(sent, got) {
		t.Errorf("%s: the connection from %s to %s: %v", when, h.from, h.to, err)
	}
}

// ipv4Header is the length of an IPv4 header without options.
const ipv4Header = 20

// Ping tells whether an address answers an ICMP echo request.
func Ping(from *netns.Host, to netip.Addr) error {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	c, err := from.Dial(network, to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	echo := []byte{request, 0, 0, 0, 'S', 'L', 0, 1}
	var sum uint32
	for i := 0; i < len(echo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(echo[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(echo[2:], ^uint16(sum)) // the kernel computes IPv6's
	if _, err := c.Write(echo); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 512)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return err
		}
		if to.Is4() && n > ipv4Header { // the kernel leaves it before the message
			n = copy(buf, buf[ipv4Header:n])
		}
		if n >= 8 && buf[0] == reply && bytes.Equal(buf[4:8], echo[4:]) {
			return nil
		}
		if n >= 1 && buf[0] != reply && buf[0] != request {
			return fmt.Errorf("ICMP type %d", buf[0])
		}
	}
}
