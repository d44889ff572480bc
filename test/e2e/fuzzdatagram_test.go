package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fuzzHeader: the session's number, the datagram's number, and its size.
const fuzzHeader = 8

// fuzzDatagram derives a datagram from the numbers of its session and its own. An
// answer's number has the high bit set.
func fuzzDatagram(seed uint64, session uint32, number uint16, most int) []byte {
	r := rand.New(rand.NewPCG(seed^uint64(session), uint64(number)))
	size := fuzzHeader + r.IntN(1200)
	switch chance := r.IntN(10); {
	case inBatches(session):
		size = fuzzHeader + int(session%1200)
	case chance == 0:
		size = fuzzHeader
	case chance == 1:
		size = max(size, r.IntN(most))
	}
	b := make([]byte, size)
	copy(b[fuzzHeader:], noise()[r.IntN(len(noise())-size):])
	binary.BigEndian.PutUint32(b, session)
	binary.BigEndian.PutUint16(b[4:], number)
	binary.BigEndian.PutUint16(b[6:], uint16(size))
	return b
}

// inBatches tells whether a session's datagrams have one size and leave the client
// in GSO batches (UDP_SEGMENT).
func inBatches(session uint32) bool { return session%2 == 0 }

const answerBit = 1 << 15

// fuzzDatagramServer answers each datagram with the answer that belongs to it.
type fuzzDatagramServer struct {
	seed uint64
	most int

	mu    sync.Mutex
	wrong []string                  // guarded by mu
	got   map[uint32]map[uint16]int // size of each datagram of each session; guarded by mu
	twice map[uint32]int            // datagrams that arrived more than once; guarded by mu
}

func (s *fuzzDatagramServer) serve(pc net.PacketConn) {
	buf := make([]byte, 65536)
	for {
		n, from, err := pc.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error in reply to an answer
		}
		session, number, err := s.take(buf[:n])
		if err != nil {
			s.mu.Lock()
			s.wrong = append(s.wrong, err.Error())
			s.mu.Unlock()
			continue
		}
		_, _ = pc.WriteTo(fuzzDatagram(s.seed, session, number|answerBit, s.most), from)
	}
}

func (s *fuzzDatagramServer) take(b []byte) (session uint32, number uint16, err error) {
	if len(b) < fuzzHeader {
		return 0, 0, fmt.Errorf("an endpoint got a datagram of %d bytes", len(b))
	}
	session, number = binary.BigEndian.Uint32(b), binary.BigEndian.Uint16(b[4:])
	if !bytes.Equal(b, fuzzDatagram(s.seed, session, number, s.most)) {
		return 0, 0, fmt.Errorf("an endpoint got a wrong datagram: session %d, number %d, %d bytes, sent with %d",
			session, number, len(b), binary.BigEndian.Uint16(b[6:]))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.got[session] == nil {
		s.got[session] = map[uint16]int{}
	}
	if _, again := s.got[session][number]; again {
		s.twice[session]++
	}
	s.got[session][number] = len(b)
	return session, number, nil
}

// fuzzSession is a client's view of a session.
type fuzzSession struct {
	id                     uint32
	client                 netip.AddrPort
	from, to               int
	began, ended           time.Time
	sent, answered         int // datagrams
	sentBytes, answerBytes int // of datagrams, each counted once
	twice                  int // answers that arrived more than once
	wrong                  error
}

// lastChance is how long a session without any answer waits for the first one at its end: a
// proxy that is paused, on a busy machine, may answer that late.
const lastChance = 10 * time.Second

// playSession sends datagrams, a few at a time, and receives answers.
func (s *fuzzDatagramServer) playSession(f *fuzzSession, conn *net.UDPConn) {
	r := rand.New(rand.NewPCG(s.seed, uint64(f.id)))
	seen := map[uint16]bool{}
	buf := make([]byte, 65536)
	for next, left := uint16(0), 1+r.IntN(40); left > 0; left-- {
		window := 1 + r.IntN(8)
		var batch []byte
		for i := range window {
			b := fuzzDatagram(s.seed, f.id, next, s.most)
			next++
			f.sent++
			f.sentBytes += len(b)
			if !inBatches(f.id) {
				_, _ = conn.Write(b) // lost, like others
			} else if batch = append(batch, b...); i == window-1 {
				_, _, _ = conn.WriteMsgUDP(batch, segments(len(b)), nil)
			}
		}
		_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if left == 1 && f.answered == 0 { // the last chance of a session that has to be answered
			_ = conn.SetReadDeadline(time.Now().Add(lastChance))
		}
		for range window {
			n, err := conn.Read(buf)
			if err != nil {
				break
			}
			_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			b := buf[:n]
			if n < fuzzHeader {
				f.wrong = fmt.Errorf("an answer of %d bytes", n)
				return
			}
			number := binary.BigEndian.Uint16(b[4:])
			if number&answerBit == 0 || !bytes.Equal(b, fuzzDatagram(s.seed, f.id, number, s.most)) {
				f.wrong = fmt.Errorf("a wrong answer of %d bytes, number %d of session %d", n, number, binary.BigEndian.Uint32(b))
				return
			}
			if seen[number] {
				f.twice++
				continue
			}
			seen[number] = true
			f.answered++
			f.answerBytes += n
		}
	}
}

// segments is the control message by which the kernel splits a send into
// datagrams.
func segments(size int) []byte {
	const option = 103 // UDP_SEGMENT
	b := make([]byte, unix.CmsgSpace(2))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	header.Level, header.Type = unix.SOL_UDP, option
	header.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(b[unix.CmsgLen(0):], uint16(size))
	return b
}

// judge describes what is wrong with a session whose records are known. quiet
// tells that no fault and no bad link disturbed it.
func (f *fuzzSession) judge(records []record, gotBytes, twice int, quiet bool) error {
	if f.wrong != nil {
		return f.wrong
	}
	var up, down uint64
	for _, r := range records {
		up, down = up+r.BytesUp, down+r.BytesDown
	}
	switch {
	case f.answered > 0 && len(records) == 0:
		return errorText("it was answered and has no record")
	case up < uint64(gotBytes):
		return fmt.Errorf("the records have %d bytes from the client, the endpoint got %d", up, gotBytes)
	case down < uint64(f.answerBytes):
		return fmt.Errorf("the records have %d bytes from the endpoint, the client got %d", down, f.answerBytes)
	case !quiet:
		return nil
	case f.sent > 0 && f.answered == 0:
		return errorText("not one answer")
	case f.twice > 0 || twice > 0:
		return fmt.Errorf("%d answers and %d datagrams came twice", f.twice, twice)
	case len(records) != 1:
		return fmt.Errorf("%d records", len(records))
	case up > uint64(f.sentBytes):
		return fmt.Errorf("the record has %d bytes from the client, which sent %d", up, f.sentBytes)
	}
	return nil
}
