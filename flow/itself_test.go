package flow

import (
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// An endpoint that asks its own Service from the port at which it serves, as programs with one
// socket do, gets an answer. Between the hooks it has another port, which distinguishes its
// questions from its answers.
func TestEndpointAsksItselfByItsPort(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		endpoint := at(lab.Backends[0].IPv4, 8080)
		n := newNode(t, lab, by)
		n.apply(svc(vip4, nil, endpoint))
		askItself(t, lab.Backends[0], endpoint)
		connectToItself(t, lab.Backends[0], endpoint)
		n.finish()
		records := n.taken()
		check.Equalf(t, len(records), 2, "records")
		for _, r := range records {
			if r.Path != conntrack.Kernel || r.Client != endpoint || r.Attempts != 1 || r.BytesFromClient == 0 || r.BytesFromEndpoint == 0 {
				t.Errorf("%+v", r)
			}
		}
	})
}

// askItself asks by the socket that answers.
func askItself(t *testing.T, host *netns.Host, endpoint netip.AddrPort) {
	t.Helper()
	socket := must.Get(host.ListenPacket("udp4", endpoint.String()))(t)
	defer socket.Close()
	_ = socket.SetDeadline(time.Now().Add(patience))
	to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(vip4 + ":80"))
	must.OK(t, must.Err(socket.WriteTo([]byte("question"), to)))
	b := make([]byte, 100)
	size, from, err := socket.ReadFrom(b)
	must.OK(t, err)
	if string(b[:size]) != "question" || from.String() == endpoint.String() || strings.HasPrefix(from.String(), vip4) {
		t.Fatalf("%q from %s", b[:size], from)
	}
	must.OK(t, must.Err(socket.WriteTo([]byte("answer"), from)))
	if size, from, err = socket.ReadFrom(b); err != nil || string(b[:size]) != "answer" || from.String() != to.String() {
		t.Fatalf("%q from %s, %v", b[:size], from, err)
	}
}

// connectToItself connects by the port that accepts.
func connectToItself(t *testing.T, host *netns.Host, endpoint netip.AddrPort) {
	t.Helper()
	share := func(_, _ string, c syscall.RawConn) (err error) {
		_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return err
	}
	l := must.Get(host.ListenConfig(&net.ListenConfig{Control: share}, "tcp4", endpoint.String()))(t)
	defer l.Close()
	c, err := host.Dialer(&net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(endpoint), Control: share}, "tcp", vip4+":80")
	must.OK(t, err)
	defer c.Close()
	s := must.Get(l.Accept())(t)
	defer s.Close()
	b := make([]byte, 100)
	for _, way := range [][2]net.Conn{{c, s}, {s, c}} {
		_ = way[1].SetDeadline(time.Now().Add(patience))
		must.OK(t, must.Err(way[0].Write([]byte("word"))))
		if size, err := way[1].Read(b); err != nil || string(b[:size]) != "word" {
			t.Fatalf("%q, %v", b[:size], err)
		}
	}
}
