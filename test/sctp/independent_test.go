package sctp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	library "github.com/ishidawataru/sctp"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Peers that do not use our system calls: a mistake in them would not show between two
// peers that share it. Client and endpoint are the library's, then each is with one of ours.
func TestProxyIndependentPeers(t *testing.T) {
	lab := netns.NewLab(t, 2)
	theirs, ours := lab.Backends[0], lab.Backends[1]
	seen := make(chan libraryEnd, 100)
	serveByLibrary(t, theirs, seen)
	serve(t, ours.Namespace, at(ours), options(), echo)
	startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "theirs", ip: "10.96.0.10", endpoints: []string{theirs.IPv4.String()}},
		svc{name: "ours", ip: "10.96.0.11", endpoints: []string{ours.IPv4.String()}}))
	const ppid = 0x2e0102
	for _, ip := range []string{"10.96.0.10", "10.96.0.11"} {
		c := dialByLibrary(t, lab.Client, ip)
		check.Equalf(t, c.RemoteAddr().String(), ip+":3868", "the client is connected to")
		for i := range 20 {
			text := bytes.Repeat([]byte{byte(i + 1)}, 1+997*i)
			sent := &library.SndRcvInfo{Stream: uint16(i % 7), PPID: ppid + uint32(i)}
			if i%3 == 0 {
				sent.Flags = library.SCTP_UNORDERED
			}
			must.OK(t, must.Err(c.SCTPWrite(text, sent)))
			buffer := make([]byte, 64<<10)
			n, info, err := c.SCTPRead(buffer)
			if err != nil || info == nil {
				t.Fatalf("%s, message %d: %v, %v", ip, i, info, err)
			}
			if !bytes.Equal(buffer[:n], text) || info.Stream != sent.Stream || info.PPID != sent.PPID || info.Flags&library.SCTP_UNORDERED != sent.Flags {
				t.Errorf("%s, message %d: %d bytes, %+v came back of %d bytes, %+v", ip, i, n, info, len(text), sent)
			}
		}
		if s, err := c.GetStatus(); err != nil || s.Ostreams != 10 || s.Instreams != 10 {
			t.Errorf("%s: the client has streams %d, %d, %v", ip, s.Ostreams, s.Instreams, err)
		}
		_ = c.Close()
	}
	// Our client, their endpoint: the identifier is in network order on the wire.
	p := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
	defer p.abort()
	want := sys.MessageInfo{Stream: 3, PPID: networkOrder(ppid), Unordered: true}
	must.OK(t, p.send(note{want, []byte("ours")}))
	if got, err := p.receive(); err != nil || got.MessageInfo != want {
		t.Errorf("%+v, %v", got, err)
	}
	var last libraryEnd
	for range 21 {
		last = <-seen
	}
	if last.stream != 3 || last.ppid != ppid || last.remote == "" {
		t.Errorf("the endpoint saw %+v", last)
	}
}

// libraryEnd is what the library's endpoint says of a message.
type libraryEnd struct {
	stream uint16
	ppid   uint32
	remote string
}

// networkOrder returns the number that has the bytes of v in network order in memory.
func networkOrder(v uint32) uint32 {
	return v<<24 | v>>24 | v<<8&0xff0000 | v>>8&0xff00
}

// serveByLibrary echoes on a backend, and tells of each message.
func serveByLibrary(t *testing.T, h *netns.Host, seen chan<- libraryEnd) {
	t.Helper()
	var l *library.SCTPListener
	err := h.Do(func() (err error) {
		l, err = library.ListenSCTPExt("sctp4", &library.SCTPAddr{IPAddrs: []net.IPAddr{{IP: h.IPv4.AsSlice()}}, Port: targetPort}, library.InitMsg{NumOstreams: 64, MaxInstreams: 64})
		return err
	})
	must.OK(t, err)
	// Closing does not end a blocking accept; the process does.
	go func() {
		for {
			c, err := l.AcceptSCTP()
			if err != nil {
				return
			}
			check.OKf(t, c.SubscribeEvents(library.SCTP_EVENT_DATA_IO), "the library")
			go func() {
				defer c.Close()
				for buffer := make([]byte, 64<<10); ; {
					n, info, err := c.SCTPRead(buffer)
					if err != nil || info == nil {
						return
					}
					remote := ""
					if a := c.RemoteAddr(); a != nil {
						remote = a.String()
					}
					seen <- libraryEnd{info.Stream, info.PPID, remote}
					if _, err := c.SCTPWrite(buffer[:n], &library.SndRcvInfo{Stream: info.Stream, PPID: info.PPID, Flags: info.Flags & library.SCTP_UNORDERED}); err != nil {
						return
					}
				}
			}()
		}
	}()
}

// dialByLibrary connects. The library's blocking connect may be interrupted by a signal,
// and then says that it is connected, or connecting.
func dialByLibrary(t *testing.T, h *netns.Host, to string) *library.SCTPConn {
	t.Helper()
	type result struct {
		c   *library.SCTPConn
		err error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		r.err = wait.Poll(patience, func() error {
			return h.Do(func() (err error) {
				r.c, err = library.DialSCTPExt("sctp4", nil, &library.SCTPAddr{IPAddrs: []net.IPAddr{{IP: net.ParseIP(to).To4()}}, Port: port}, library.InitMsg{NumOstreams: 10, MaxInstreams: 10})
				return err
			})
		})
		if r.err == nil {
			r.err = r.c.SubscribeEvents(library.SCTP_EVENT_DATA_IO)
		}
		done <- r
	}()
	select {
	case r := <-done:
		if r.err != nil {
			t.Fatal(fmt.Errorf("the library's client to %s: %w", to, r.err))
		}
		return r.c
	case <-time.After(patience + time.Second):
		t.Fatal(errors.Join(errors.New("the library's client does not connect"), syscall.ETIMEDOUT))
		return nil
	}
}
