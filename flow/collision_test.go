package flow

import (
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// named gives a Service another name.
func named(name string, c service.Change) service.Change {
	c.Services[0].Name = name
	for _, s := range c.EndpointSlices {
		s.Name = name + s.Name
		s.Labels["kubernetes.io/service-name"] = name
	}
	return c
}

// dialFrom connects from a port that other connections of the host have too.
func dialFrom(t *testing.T, h *netns.Host, port int, to string) net.Conn {
	t.Helper()
	c, err := h.Dialer(&net.Dialer{
		Timeout:   patience,
		LocalAddr: &net.TCPAddr{IP: netns.Pick([]netip.Addr{h.IPv4, h.IPv6}, netip.MustParseAddrPort(to).Addr()).AsSlice(), Port: port},
		Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			return err
		},
	}, "tcp", to)
	must.OKf(t, err, "to %s", to)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A client may use one port towards two Services that lead to one endpoint, and towards
// that endpoint itself: one of them gets another port between the hooks.
func TestOnePortTowardsOneEndpoint(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].WitnessTCP(t, 8080)
		endpoint := netip.AddrPortFrom(lab.Backends[0].IPv4, 8080)
		for _, order := range [][]string{
			{vip4 + ":80", "10.96.0.11:80"},
			{endpoint.String(), vip4 + ":80", "10.96.0.11:80"},
		} {
			n := newNode(t, lab, by)
			n.apply(svc(vip4, nil, endpoint))
			n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
			seen := make(map[string]string)
			var open []net.Conn
			for _, to := range order {
				c := dialFrom(t, lab.Client, 45678, to)
				said, err := netns.AskOn(c)
				must.OKf(t, err, "%v: to %s", order, to)
				if other, is := seen[said]; is {
					t.Errorf("%v: the endpoint saw %s from %s and %s", order, said, other, to)
				}
				seen[said] = to
				open = append(open, c)
			}
			for _, c := range open {
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
			}
			n.finish()
		}
	})
}

// A packet whose way back another flow has is sent again with another port, also if one
// system call sends others before it. Else the client's SYN would leave by its interface.
func TestCollisionBehindAnotherPacket(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	endpoint := netip.AddrPortFrom(lab.Backends[0].IPv4, 8080)
	n := newNode(t, lab, func(o *Options) { o.ask = true })
	n.apply(svc(vip4, nil, endpoint))
	n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
	dialFrom(t, lab.Client, 45678, vip4+":80")
	asked := n.server.Stats().Kernel["asked"]
	held := make(chan struct{})
	n.loop.Post(func() { <-held })
	var dialing sync.WaitGroup
	for i, to := range []string{vip4 + ":80", "10.96.0.11:80"} {
		dialing.Go(func() { dialFrom(t, lab.Client, 45679-i, to) })
		wait.True(t, "an upcall", func() bool { return n.server.Stats().Kernel["asked"] > asked+uint64(i) }) // a SYN may come again
	}
	close(held)
	dialing.Wait()
	n.finish()
	for _, r := range n.taken() {
		if r.Attempts != 1 || r.Path != conntrack.Kernel {
			t.Errorf("%+v", r)
		}
	}
	check.Equalf(t, len(n.taken()), 3, "records")
}

// A client that has a UDP session through a Service may ask its endpoint itself from the
// same port. Each answer comes from where the client has asked, also if it has asked both
// before the first one comes. The endpoint sees the client's own port where the session hides
// it, and another one where it would take both for one session.
func TestSessionBesideQuestionsToTheEndpoint(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].WitnessUDP(t, 8080)
			endpoint := at(lab.Backends[0].IPv4, 8080)
			n := newNode(t, lab, by)
			n.config.MasqueradeAll = hidden
			n.apply(svc(vip4, nil, endpoint))
			socket := must.Get(lab.Client.ListenPacket("udp4", lab.Client.IPv4.String()+":45678"))(t)
			defer socket.Close()
			own := "b1:8080 " + lab.Client.IPv4.String() + ":45678"
			// ask asks all at once, and returns what each said.
			ask := func(all ...string) map[string]string {
				t.Helper()
				for _, to := range all {
					must.OK(t, must.Err(socket.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))))
				}
				said := make(map[string]string)
				b := make([]byte, 1<<10)
				for range all {
					_ = socket.SetReadDeadline(time.Now().Add(patience))
					size, from, err := socket.ReadFrom(b)
					if err != nil {
						t.Fatalf("hidden %v: asked %v: %v, after %v", hidden, all, err, said)
					}
					said[from.String()], _, _ = strings.Cut(string(b[:size]), "\n")
				}
				return said
			}
			vip := vip4 + ":80"
			for _, all := range [][]string{{vip}, {endpoint.String()}, {vip}, {endpoint.String(), vip}, {vip, endpoint.String()}} {
				said := ask(all...)
				for _, to := range all {
					switch is := said[to]; {
					case is == "":
						t.Errorf("hidden %v: asked %v: answers of %v", hidden, all, said)
					case (is == own) != (hidden == (to != vip)):
						t.Errorf("hidden %v: asked %v, the endpoint saw %v", hidden, all, said)
					}
				}
			}
			n.finish()
			if r := n.taken(); len(r) != 1 || r[0].DatagramsFromClient != 4 || r[0].DatagramsFromEndpoint != 4 || r[0].Path != conntrack.Kernel {
				t.Errorf("hidden %v: %+v", hidden, r)
			}
		})
	}
}

// A flow that ends while it is asked sends what is queued. If another flow's packet collides
// then, the entries of the first one are deleted all the same.
func TestFlowEndsWhileAnotherOneCollides(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessUDP(t, 8080)
	endpoint := at(lab.Backends[0].IPv4, 8080)
	n := newNode(t, lab, func(o *Options) { o.ask = true })
	n.apply(svc(vip4, nil, endpoint))
	n.apply(named("other", svc("10.96.0.11", nil, endpoint)))
	n.apply(named("silent", svc("10.96.0.12", nil, at(nobodyAt(t, lab, lab.Backends[0]), 8080))))
	socket := must.Get(lab.Client.ListenPacket("udp4", lab.Client.IPv4.String()+":45678"))(t)
	defer socket.Close()
	send := func(to string) {
		check.OK(t, must.Err(socket.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))))
	}
	send(vip4 + ":80")
	wait.True(t, "a session", func() bool { return n.server.Stats().Open == 1 })
	var dialing sync.WaitGroup
	dialing.Go(func() { _, _ = lab.Client.Ask("tcp", "10.96.0.12:80") })
	wait.True(t, "a handshake", func() bool { return n.server.Stats().Open == 2 })
	w, ended := n.server.worker, make(chan struct{})
	n.loop.Post(func() {
		defer close(ended)
		send("10.96.0.11:80")
		for w.upcalls.AvailableBytes() == 0 {
			runtime.Gosched()
		}
		w.read(w.upcalls, upcallShare, w.handle)
		for _, f := range w.flows {
			if f != nil && !f.isUDP() {
				f.EndConnection(conntrack.Admin)
			}
		}
	})
	<-ended
	dialing.Wait()
	n.stop() // counts the entries
	n.left = true
	n.end()
}
