package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// ending is the course of a talk and who ends it.
type ending uint8

const (
	endTogether    ending = iota // both send at once, and each ends its half when it has sent all
	endClientFirst               // the server sends after the client's half has ended
	endServerFirst               // the client sends after the server's half has ended
	endClientReset               // the client resets after a part, while both send
	endServerReset               // the server resets after a part, while both send
	endings
)

// talk is the script of one connection. Both sides derive it from its number, so
// that each knows every byte that it has to receive.
type talk struct {
	id       uint32
	ending   ending
	up, down []byte        // what client and server send after the greeting
	cut      int           // bytes that a side sends before it resets
	pace     time.Duration // between two pieces, or 0
}

// greeting: the client sends the talk's number, the server answers with one byte.
// So a reset can never overtake the number.
const (
	greetingUp   = 4
	greetingDown = 1
)

// noise is the source of the talks' bytes.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 4<<20)
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
})

// newTalk returns the script with that number, of size bytes each way.
func newTalk(id uint32, size int) talk {
	r := rand.New(rand.NewPCG(uint64(id), 3))
	piece := func() []byte {
		at := r.IntN(len(noise()) - size)
		return noise()[at : at+size]
	}
	return talk{id: id, ending: ending(r.IntN(int(endings))), up: piece(), down: piece(), cut: r.IntN(size + 1)}
}

// outcome is one side's view of a talk.
type outcome struct {
	got int   // bytes that arrived, all of them right
	err error // nil if the other side's half ended with a FIN
}

var errWrongBytes = errors.New("wrong bytes")

// talkTimeout bounds a whole talk.
const talkTimeout = 60 * time.Second

// receive reads until the other side's half ends.
func receive(c *net.TCPConn, want []byte, buf []byte) outcome {
	got := 0
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if got+n > len(want) || !bytes.Equal(buf[:n], want[got:got+n]) {
				return outcome{got, fmt.Errorf("%w after %d", errWrongBytes, got)}
			}
			got += n
		}
		if err == io.EOF {
			return outcome{got, nil}
		}
		if err != nil {
			return outcome{got, err}
		}
	}
}

// send writes in pieces of all sizes, one in each interval of pace.
func send(c *net.TCPConn, data []byte, r *rand.Rand, pace time.Duration) error {
	var next <-chan time.Time
	if pace > 0 {
		tick := time.NewTicker(pace)
		defer tick.Stop()
		next = tick.C
	}
	for len(data) > 0 {
		n := min(len(data), 1+r.IntN(1<<(r.IntN(12)+6)))
		if _, err := c.Write(data[:n]); err != nil {
			return err
		}
		if data = data[n:]; next != nil {
			<-next
		}
	}
	return nil
}

// sendAll ends this half after its data.
func (k *talk) sendAll(c *net.TCPConn, data []byte, r *rand.Rand) error {
	if err := send(c, data, r, k.pace); err != nil {
		return err
	}
	return c.CloseWrite()
}

// sendPart resets the connection after its data.
func (k *talk) sendPart(c *net.TCPConn, data []byte, r *rand.Rand) error {
	var err error
	if k.pace > 0 {
		err = send(c, data, r, k.pace)
	} else {
		_, err = c.Write(data)
	}
	if err != nil {
		return err
	}
	if err := c.SetLinger(0); err != nil {
		return err
	}
	return c.Close()
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

var readBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// side plays one side of a talk after the greeting: it sends mine, expects theirs,
// and follows the script as the side that begins if first is set, waits if last is
// set, and resets if resets is set.
func (k *talk) side(c *net.TCPConn, mine, theirs []byte, waits, resets bool) outcome {
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	r := rand.New(rand.NewPCG(uint64(k.id), 5))
	if waits {
		o := receive(c, theirs, *buf)
		if o.err != nil {
			return o
		}
		o.err = k.sendAll(c, mine, r)
		return o
	}
	sent := make(chan error, 1)
	go func() {
		if resets {
			sent <- k.sendPart(c, mine[:k.cut], r)
			return
		}
		sent <- k.sendAll(c, mine, r)
	}()
	o := receive(c, theirs, *buf)
	err := <-sent
	// A reset is reported once: by the read or by the write.
	if o.err == nil || isReset(err) {
		o.err = errors.Join(o.err, err)
	}
	return o
}

// talkServer plays the servers' side on any number of backends.
type talkServer struct {
	size     int
	pace     time.Duration // of its talks; set before it listens
	mu       sync.Mutex
	outcomes map[uint32]chan outcome // guarded by mu
}

func newTalkServer(size int) *talkServer {
	return &talkServer{size: size, outcomes: map[uint32]chan outcome{}}
}

// outcome returns the channel for the server's view of a talk.
func (s *talkServer) outcome(id uint32) chan outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := s.outcomes[id]
	if ch == nil {
		ch = make(chan outcome, 1)
		s.outcomes[id] = ch
	}
	return ch
}

// listen serves talks on a port of the host until the test ends.
func (s *talkServer) listen(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	h.ServeTCP(t, fmt.Sprintf(":%d", port), s.serve)
}

func (s *talkServer) serve(c *net.TCPConn) {
	_ = c.SetDeadline(time.Now().Add(talkTimeout))
	var number [greetingUp]byte
	if _, err := io.ReadFull(c, number[:]); err != nil {
		return // the talk is unknown; its client will report it
	}
	k := newTalk(binary.BigEndian.Uint32(number[:]), s.size)
	k.pace = s.pace
	if _, err := c.Write(make([]byte, greetingDown)); err != nil {
		s.outcome(k.id) <- outcome{err: err}
		return
	}
	s.outcome(k.id) <- k.side(c, k.down, k.up, k.ending == endClientFirst, k.ending == endServerReset)
}

// play plays a whole talk from the client's side and judges both sides. It returns
// the client's address, by which the record can be found.
func (s *talkServer) play(from *netns.Host, address string, id uint32) (netip.AddrPort, error) {
	k := newTalk(id, s.size)
	k.pace = s.pace
	conn, err := from.Dial("tcp", address)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("talk %d: %w", id, err)
	}
	c := conn.(*net.TCPConn)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(talkTimeout))
	local := netip.MustParseAddrPort(c.LocalAddr().String())

	if _, err := c.Write(binary.BigEndian.AppendUint32(nil, id)); err != nil {
		return local, fmt.Errorf("talk %d: greeting: %w", id, err)
	}
	var ack [greetingDown]byte
	if _, err := io.ReadFull(c, ack[:]); err != nil {
		return local, fmt.Errorf("talk %d: greeting: %w", id, err)
	}
	client := k.side(c, k.up, k.down, k.ending == endServerFirst, k.ending == endClientReset)
	if k.ending != endClientReset {
		_ = c.Close()
	}
	var server outcome
	select {
	case server = <-s.outcome(id):
	case <-time.After(talkTimeout):
		return local, fmt.Errorf("talk %d (ending %d): the server's side never ended", id, k.ending)
	}
	if err := k.judge(client, server); err != nil {
		return local, fmt.Errorf("talk %d (ending %d, cut %d): %w", id, k.ending, k.cut, err)
	}
	return local, nil
}

// judge describes what is wrong with what the two sides saw.
func (k *talk) judge(client, server outcome) error {
	if errors.Is(client.err, errWrongBytes) || errors.Is(server.err, errWrongBytes) {
		return fmt.Errorf("client: %w, server: %w", client.err, server.err)
	}
	switch k.ending {
	case endClientReset:
		if !isReset(server.err) {
			return fmt.Errorf("the client reset, the server saw %v after %d bytes", server.err, server.got)
		}
		return nil
	case endServerReset:
		if !isReset(client.err) {
			return fmt.Errorf("the server reset, the client saw %v after %d bytes", client.err, client.got)
		}
		return nil
	}
	if client.err != nil || server.err != nil {
		return fmt.Errorf("client: %v, server: %v", client.err, server.err)
	}
	if client.got != len(k.down) || server.got != len(k.up) {
		return fmt.Errorf("the client got %d of %d bytes, the server %d of %d", client.got, len(k.down), server.got, len(k.up))
	}
	return nil
}

// TestTalkWithoutProxy connects the test's own client and server directly, so that
// later differences are the proxy's.
func TestTalkWithoutProxy(t *testing.T) {
	lab := netns.NewLab(t, 1)
	s := newTalkServer(64 << 10)
	s.listen(t, lab.Backends[0], 8080)
	address := netip.AddrPortFrom(lab.Backends[0].IPv4, 8080).String()
	for id := range uint32(100) {
		check.OK(t, must.Err(s.play(lab.Client, address, id)))
	}
}
