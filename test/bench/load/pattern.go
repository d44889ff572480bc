package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"
)

// The pattern port carries streams in which every byte depends on its position,
// for runs in which one side is slow and nothing may be lost. The client sends a
// header first. In a download the server sends Size bytes as fast as it can and
// the client reads slowly. In an upload the server reads slowly, and answers with
// the number of correct bytes.

// PatternSpec describes one such stream.
type PatternSpec struct {
	Upload bool
	Size   uint64        // bytes, a multiple of 8
	Rate   uint64        // bytes a second that the slow side reads at first
	Slow   time.Duration // how long; then it reads as fast as it can
}

const (
	patternChunk = 64 << 10
	patternHead  = 32
)

// fillPattern writes the pattern for a position in the stream. The position and
// len(p) are multiples of 8.
func fillPattern(p []byte, position uint64) {
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], position+uint64(i))
	}
}

// checkPattern returns the number of bytes at the beginning of p that are correct
// for a position in the stream; the last few may be part of a word.
func checkPattern(p []byte, position uint64) int {
	var word [8]byte
	for i := range p {
		at := position + uint64(i)
		if i == 0 || at%8 == 0 {
			binary.LittleEndian.PutUint64(word[:], at&^7)
		}
		if p[i] != word[at%8] {
			return i
		}
	}
	return len(p)
}

func writePattern(w io.Writer, size uint64) error {
	buf := make([]byte, patternChunk)
	for at := uint64(0); at < size; {
		n := min(size-at, patternChunk)
		fillPattern(buf[:n], at)
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
		at += n
	}
	return nil
}

// readPattern reads to the end, slowly at first, and returns the number of correct
// bytes.
func readPattern(r io.Reader, rate uint64, slow time.Duration) (uint64, error) {
	buf := make([]byte, patternChunk)
	begin := time.Now()
	for at := uint64(0); ; {
		if passed := time.Since(begin); passed < slow {
			ahead := time.Duration(float64(at)/float64(rate)*1e9) - passed
			time.Sleep(min(ahead, slow-passed))
		}
		n, err := r.Read(buf)
		if right := checkPattern(buf[:n], at); right < n {
			return at + uint64(right), errors.New("a wrong byte")
		}
		at += uint64(n)
		if errors.Is(err, io.EOF) {
			return at, nil
		}
		if err != nil {
			return at, err
		}
	}
}

// servePattern serves the pattern port until the process ends.
func servePattern(at netip.AddrPort) error {
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", at.String())
	if err != nil {
		return fmt.Errorf("pattern port: %w", err)
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("pattern port: %w", err)
		}
		go answerPattern(conn.(*net.TCPConn))
	}
}

func answerPattern(conn *net.TCPConn) {
	defer conn.Close()
	var head [patternHead]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return
	}
	spec := PatternSpec{
		Upload: head[0] == 1,
		Size:   binary.LittleEndian.Uint64(head[8:]),
		Rate:   binary.LittleEndian.Uint64(head[16:]),
		Slow:   time.Duration(binary.LittleEndian.Uint64(head[24:])),
	}
	if !spec.Upload {
		// The client notices a failure: the stream is too short.
		_ = writePattern(conn, spec.Size)
		return
	}
	right, _ := readPattern(conn, max(spec.Rate, 1), spec.Slow)
	_, _ = conn.Write(binary.LittleEndian.AppendUint64(nil, right))
}

// RunPattern carries one stream and returns the number of bytes that arrived
// correctly; fewer than spec.Size is an error.
func RunPattern(target netip.Addr, spec PatternSpec, limit time.Duration) (uint64, error) {
	c, err := net.DialTimeout("tcp", netip.AddrPortFrom(target, PortPattern).String(), noProgress)
	if err != nil {
		return 0, err
	}
	conn := c.(*net.TCPConn)
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return 0, err
	}
	var head [patternHead]byte
	if spec.Upload {
		head[0] = 1
	}
	binary.LittleEndian.PutUint64(head[8:], spec.Size)
	binary.LittleEndian.PutUint64(head[16:], spec.Rate)
	binary.LittleEndian.PutUint64(head[24:], uint64(spec.Slow))
	if _, err := conn.Write(head[:]); err != nil {
		return 0, err
	}
	right, err := transferPattern(conn, spec)
	if err == nil && right != spec.Size {
		err = fmt.Errorf("%d of %d bytes arrived", right, spec.Size)
	}
	return right, err
}

func transferPattern(conn *net.TCPConn, spec PatternSpec) (uint64, error) {
	if !spec.Upload {
		return readPattern(conn, max(spec.Rate, 1), spec.Slow)
	}
	if err := writePattern(conn, spec.Size); err != nil {
		return 0, err
	}
	if err := conn.CloseWrite(); err != nil {
		return 0, err
	}
	var count [8]byte
	if _, err := io.ReadFull(conn, count[:]); err != nil {
		return 0, fmt.Errorf("the server's count: %w", err)
	}
	return binary.LittleEndian.Uint64(count[:]), nil
}
