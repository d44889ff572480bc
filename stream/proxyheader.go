package stream

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/pires/go-proxyproto"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// serviceTLV is the type of the TLV in headers of version 2 that has the Service's
	// namespace/name: one of those for custom use.
	serviceTLV = proxyproto.PP2Type(0xE1)
	// headerPatience is how long a load balancer may take to send a header. The protocol
	// asks for 3 s at least, for a packet that is lost.
	headerPatience = 5 * time.Second
	// longestHeader is the length of the longest header that is accepted, with its TLVs.
	longestHeader = 4096
	// longestLine is that of version 1, and fixedPart what every header of version 2 has.
	longestLine = 107
	fixedPart   = 16
)

// proxyHeader returns the header by which an endpoint learns of a connection's client. If
// client and Service differ in family, both are written as IPv6 addresses.
func proxyHeader(r *conntrack.Record) []byte {
	h := proxyproto.Header{
		Version: r.Port.SendProxy, Command: proxyproto.PROXY, TransportProtocol: proxyproto.TCPv6,
		SourceAddr: net.TCPAddrFromAddrPort(r.Client), DestinationAddr: net.TCPAddrFromAddrPort(r.VIP),
	}
	if r.Client.Addr().Is4() && r.VIP.Addr().Is4() {
		h.TransportProtocol = proxyproto.TCPv4
	}
	if h.Version == 2 {
		_ = h.SetTLVs([]proxyproto.TLV{{Type: serviceTLV, Value: []byte(r.Port.Name.Name.String())}}) // of at most 317 bytes
	}
	b, _ := h.Format() // both addresses are of the family
	return b
}

// headerReader reads the headers of one loop's connections.
type headerReader struct {
	bytes  [longestHeader]byte
	source bytes.Reader
	reader *bufio.Reader
}

var (
	errPartial = errors.New("the header is not complete yet")
	errHeader  = errors.New("not a PROXY header")
)

// lengthOf returns the length of the header that bytes begin with. errPartial means that
// they may be the beginning of one.
func lengthOf(p []byte) (int, error) {
	begins := func(signature []byte) bool {
		return bytes.Equal(p[:min(len(p), len(signature))], signature[:min(len(p), len(signature))])
	}
	switch {
	case begins(proxyproto.SIGV1):
		if end := bytes.IndexByte(p[:min(len(p), longestLine)], '\n'); end >= 0 {
			return end + 1, nil
		}
		if len(p) >= longestLine {
			return 0, errHeader
		}
		return 0, errPartial
	case !begins(proxyproto.SIGV2):
		return 0, errHeader
	case len(p) < fixedPart:
		return 0, errPartial
	}
	length := fixedPart + int(binary.BigEndian.Uint16(p[fixedPart-2:]))
	switch {
	case length > longestHeader:
		return 0, errHeader
	case length > len(p):
		return 0, errPartial
	}
	return length, nil
}

// parse returns the client that a whole header names; invalid if the load balancer itself
// is the client, as for its health checks.
func (h *headerReader) parse(p []byte) (client netip.AddrPort, err error) {
	h.source.Reset(p)
	if h.reader == nil {
		h.reader = bufio.NewReaderSize(nil, longestHeader)
	}
	h.reader.Reset(&h.source)
	header, err := proxyproto.Read(h.reader)
	if err != nil || h.reader.Buffered()+h.source.Len() > 0 {
		return netip.AddrPort{}, errHeader
	}
	if header.Command.IsLocal() {
		return netip.AddrPort{}, nil
	}
	tcp, ok := header.SourceAddr.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}, errHeader // UDP, or a unix socket
	}
	client = unmap(tcp.AddrPort())
	switch a := client.Addr(); {
	case a.IsLoopback(): // the load balancer's own
		return netip.AddrPort{}, nil
	case service.CheckAddress(a) != nil:
		return netip.AddrPort{}, errHeader
	}
	return client, nil
}

// awaitHeader reads the header of a connection to a service port that has them sent, at
// once if it is there. Others than its load balancers are reset.
func (c *conn) awaitHeader() {
	if !c.record.Port.Trusts(c.record.Client.Addr()) {
		c.fail(conntrack.ProxyNotTrusted)
		return
	}
	if end := c.counts.end(); end != conntrack.EndNone {
		c.fail(end)
		return
	}
	if !c.takeHeader(0) {
		c.await(header, poll.Nanotime()+int64(headerPatience))
	}
}

// takeHeader reads the header if it is complete, and goes on with the client that it
// names. It returns false if the header is still to come. What follows the header stays in
// the socket.
func (c *conn) takeHeader(ev poll.Events) (decided bool) {
	h := &c.worker.headers
	n, errno := sys.Peek(int(c.client), h.bytes[:])
	switch {
	case errno == sys.EAGAIN:
		return false
	case errno != 0:
		c.fail(conntrack.ClientReset)
		return true
	case n == 0: // as load balancers do that only look whether somebody listens
		c.fail(conntrack.ClientFin)
		return true
	}
	length, err := lengthOf(h.bytes[:n])
	if errors.Is(err, errPartial) && ev&poll.PeerDone == 0 {
		return false
	}
	var client netip.AddrPort
	if err == nil {
		client, err = h.parse(h.bytes[:length])
	}
	if err == nil {
		if n, errno := sys.Recv(int(c.client), h.bytes[:length]); errno != 0 || n != length {
			err = errHeader
		}
	}
	if err != nil {
		c.fail(conntrack.ProxyHeader)
		return true
	}
	if c.awaits == header {
		c.endWait()
	}
	if client.IsValid() {
		c.record.NamedBy(c.record.Client, client)
	}
	c.proceed()
	return true
}

// proceed begins to dial for the client that the header names.
func (c *conn) proceed() {
	st, v := c.worker.decide(c.record.Protocol, c.record.Client.Addr(), c.record.VIP)
	if v.Port == nil || v.Port.Name != c.record.Port.Name {
		c.fail(conntrack.NoEndpoints)
		return
	}
	if c.begin(st, &v) {
		c.worker.stalled = append(c.worker.stalled, stalled{conn: c})
		c.worker.awaitRoom()
	}
}
