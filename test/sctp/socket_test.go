// Package sctp holds tests that need a kernel with SCTP. Package vm runs them in a guest;
// elsewhere they do nothing.
package sctp

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Messages arrive with their bounds, streams, identifiers and order.
func TestMailboxKeepsMessages(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		s := serve(t, nil, at, options(), echo)
		p := must.Get(dial(nil, s.addr.String(), options()))(t)
		for i, size := range []int{1, 2, 100, 1452, 65535, 65536, 200_000} {
			want := note{sys.MessageInfo{PPID: 0x01020304 + uint32(i), Stream: uint16(9 * i), Unordered: i%2 == 1}, bytes.Repeat([]byte{byte(i + 1)}, size)}
			must.OKf(t, p.send(want), "%s: %d bytes", at, size)
			got, err := p.receive()
			if err != nil || got.MessageInfo != want.MessageInfo || !bytes.Equal(got.text, want.text) {
				t.Fatalf("%s: %d bytes came back as %d, %+v, %v, want %+v", at, size, len(got.text), got.MessageInfo, err, want.MessageInfo)
			}
		}
		check.Equalf(t, p.box.Send(p.fd, []byte("x"), sys.MessageInfo{Stream: 64}), sys.EINVAL, "a stream that was not granted")
		check.OK(t, p.shutDown())
		check.ErrorIsf(t, must.Err(p.receive()), errShutDown, "after the shutdown")
		sys.Close(p.fd)
	}
}

// Receive and Send do not allocate.
func TestMailboxDoesNotAllocate(t *testing.T) {
	s := serve(t, nil, "127.0.0.1:0", options(), func(*peer) {})
	p := must.Get(dial(nil, s.addr.String(), options()))(t)
	text := make([]byte, 100)
	if n := testing.AllocsPerRun(100, func() {
		check.Equal(t, p.box.Send(p.fd, text, sys.MessageInfo{Stream: 1}), 0)
		_, _, _, _ = p.box.Receive(p.fd, p.buffer)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	p.abort()
}

// talk sends a text to an echo.
func talk(t testing.TB, p *peer, text string) {
	t.Helper()
	must.OKf(t, p.send(note{text: []byte(text)}), "%s", text)
	if got, err := p.receive(); err != nil || string(got.text) != text {
		t.Fatalf("%s: %q, %v", text, got.text, err)
	}
}

// RefuseSCTP has the kernel abort; ListenAgain undoes it.
func TestRefusing(t *testing.T) {
	s := serve(t, nil, "127.0.0.1:0", options(), echo)
	quickest := time.Hour // a busy machine delays some
	for round := range 3 {
		p, err := dial(nil, s.addr.String(), options())
		must.OKf(t, err, "round %d", round)
		talk(t, p, "accepted")
		must.Equal(t, sys.RefuseSCTP(s.fd), 0)
		began := time.Now()
		check.ErrorIsf(t, must.Err(dial(nil, s.addr.String(), options())), sys.ECONNREFUSED, "a refusing socket")
		quickest = min(quickest, time.Since(began))
		talk(t, p, "lives on")
		must.Equal(t, sys.ListenAgain(s.fd, 0), 0)
		p.abort()
	}
	if quickest > time.Second {
		t.Errorf("the ABORT took %v", quickest)
	}
}

// The number of streams, and the address of the source.
func TestStreamsAndSource(t *testing.T) {
	o := options()
	o.InStreams, o.OutStreams = 7, 9
	s := serve(t, nil, "127.0.0.1:0", o, echo)
	p := must.Get(dial(nil, s.addr.String(), options()))(t)
	if got, e := sys.SCTPStatusOf(p.fd); e != 0 || got.Out != 7 || got.In != 9 {
		t.Errorf("%+v, %v", got, e)
	}
	p.abort()
	if got, e := sys.SourceOf(netip.MustParseAddrPort("127.0.0.9:5")); e != 0 || got != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("%v, %v", got, e)
	}
}

// How each end looks to the peer: relays depend on it.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*peer)
		want error
	}{
		{"close in order", func(p *peer) { sys.CloseInOrder(p.fd) }, io.EOF},
		{"shutdown", func(p *peer) { _ = p.shutDown() }, io.EOF},
		{"abort", func(p *peer) { _ = p.settled(); p.abort() }, sys.ECONNRESET},
	} {
		got := make(chan string, 1)
		s := serve(t, nil, "127.0.0.1:0", options(), func(p *peer) {
			read := 0
			for {
				if _, err := p.receive(); err != nil {
					got <- fmt.Sprint(read, " ", err)
					return
				}
				read++
			}
		})
		p := must.Get(dial(nil, s.addr.String(), options()))(t)
		for range 20 {
			must.OK(t, p.send(note{text: make([]byte, 1+rand.IntN(2000))}))
		}
		c.end(p)
		check.Equalf(t, <-got, fmt.Sprint("20 ", c.want), "%s: the peer saw", c.name)
	}
}
