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
	"os"
	"time"
)

// resolver asks a DNS server as the resolvers of C libraries do: over UDP from its
// own socket, again if no answer arrives in time, and over TCP if the answer was
// truncated. It belongs to one goroutine, which stays in its namespace.
type resolver struct {
	server netip.AddrPort
	conn   *net.UDPConn // unconnected, so that an answer of a wrong sender is noticed
	asked  map[uint16]struct{}
	buf    [1500]byte

	again, late, refused, overTCP int
	answered                      map[netip.Addr]int // by the server's name in the answer
}

// resolverPatience is how long a resolver waits for the answer to its first,
// second, … attempt. glibc waits 5 s, twice.
var resolverPatience = [...]time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second}

// questionsOfASocket is the number of questions from one socket.
const questionsOfASocket = 4

func newResolver(server netip.AddrPort) *resolver {
	return &resolver{server: server, answered: map[netip.Addr]int{}}
}

func (r *resolver) close() {
	if r.conn != nil {
		_ = r.conn.Close()
		r.conn = nil
	}
}

// The parts of a DNS message.
const (
	dnsHeader    = 12
	dnsResponse  = 1 << 15
	dnsTruncated = 1 << 9
	dnsRecursion = 1 << 8
	dnsA         = 1
	dnsTXT       = 16
)

// dnsQuestion returns a message that asks for a record of a name in the zone
// "test".
func dnsQuestion(id uint16, name string, kind uint16) []byte {
	m := binary.BigEndian.AppendUint16(nil, id)
	m = append(m, dnsRecursion>>8, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	for _, label := range []string{name, "test"} {
		m = append(append(m, byte(len(label))), label...)
	}
	m = append(m, 0)
	m = binary.BigEndian.AppendUint16(m, kind)
	return append(m, 0, 1)
}

// ask repeats a question until it is answered, and checks the answer.
func (r *resolver) ask(name string, kind uint16) error {
	if r.conn == nil || len(r.asked) >= questionsOfASocket {
		r.close()
		conn, err := net.ListenPacket("udp", ":0")
		if err != nil {
			return err
		}
		r.conn, r.asked = conn.(*net.UDPConn), map[uint16]struct{}{}
	}
	id := uint16(rand.Uint32())
	for _, was := r.asked[id]; was; _, was = r.asked[id] {
		id++
	}
	r.asked[id] = struct{}{}
	question := dnsQuestion(id, name, kind)
	for i, patience := range resolverPatience {
		if i > 0 {
			r.again++
		}
		if _, err := r.conn.WriteToUDPAddrPort(question, r.server); err != nil {
			r.refused++ // the node itself learns at once that there is no endpoint
			continue
		}
		answer, err := r.receive(id, time.Now().Add(patience))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if binary.BigEndian.Uint16(answer[2:])&dnsTruncated != 0 {
			return r.askTCP(question)
		}
		return r.check(question, answer)
	}
	return fmt.Errorf("%s: no answer, asked %d times", name, len(resolverPatience))
}

// receive waits for the answer with an id. Answers to earlier questions of this
// socket may arrive late.
func (r *resolver) receive(id uint16, until time.Time) ([]byte, error) {
	_ = r.conn.SetReadDeadline(until)
	for {
		n, from, err := r.conn.ReadFromUDPAddrPort(r.buf[:])
		if err != nil {
			return nil, err
		}
		if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != r.server {
			return nil, fmt.Errorf("an answer from %s, want %s", from, r.server)
		}
		if n < dnsHeader {
			return nil, fmt.Errorf("an answer of %d bytes", n)
		}
		got := binary.BigEndian.Uint16(r.buf[:])
		if got == id {
			return r.buf[:n], nil
		}
		if _, ours := r.asked[got]; !ours {
			return nil, fmt.Errorf("an answer with id %d, which this socket did not ask with", got)
		}
		r.late++
	}
}

// askTCP asks over TCP, with the length before the message.
func (r *resolver) askTCP(question []byte) error {
	r.overTCP++
	var err error
	for range 2 {
		var answer []byte
		if answer, err = r.exchangeTCP(question); err == nil {
			return r.check(question, answer)
		}
	}
	return fmt.Errorf("over TCP: %w", err)
}

func (r *resolver) exchangeTCP(question []byte) ([]byte, error) {
	conn, err := net.DialTimeout("tcp", r.server.String(), startTimeout)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(startTimeout))
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(question))), question...)); err != nil {
		return nil, err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return nil, err
	}
	answer := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err = io.ReadFull(conn, answer)
	return answer, err
}

// check expects an answer to be one record for this question.
func (r *resolver) check(question, answer []byte) error {
	body := len(question)
	switch {
	case len(answer) < body+12 || !bytes.Equal(answer[:2], question[:2]) || !bytes.Equal(answer[dnsHeader:body], question[dnsHeader:]):
		return fmt.Errorf("%x is no answer to %x", answer, question)
	case binary.BigEndian.Uint16(answer[2:])&(dnsResponse|0xf) != dnsResponse || binary.BigEndian.Uint16(answer[6:]) != 1:
		return fmt.Errorf("%x does not answer with one record", answer)
	}
	// The name (a two-byte pointer to the question's name), type, class, time to
	// live and length, and the data.
	if kind := binary.BigEndian.Uint16(question[body-4:]); kind == dnsA {
		if a, ok := netip.AddrFromSlice(answer[body+12:]); ok {
			r.answered[a]++
			return nil
		}
		return fmt.Errorf("%x holds no address", answer)
	}
	if want := dnsTextLength + dnsTextLength/255 + 1; len(answer) != body+12+want {
		return fmt.Errorf("a text of %d bytes, want %d", len(answer)-body-12, want)
	}
	return nil
}
