package load

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// The holder keeps connections open and runs commands on them, one at a time. Its
// speed does not matter, so it is ordinary Go.

// HoldCommand is one line of the holder's input, in JSON.
type HoldCommand struct {
	Op      string // "open", "ping" or "close"
	Network string // "open": "udp" for sessions, "sctp" for associations; empty for TCP connections
	N       int    // how many to open or close
	AtOnce  int    // how many take their step at once; 0 for 32
}

// HoldReply is one line of its output.
type HoldReply struct {
	Good          int            // connections whose step succeeded
	Errors        map[string]int // the others, by cause
	Open          int            // connections open now
	P50, P99, Max time.Duration  // of the good ones
}

// holdTimeout bounds each connection's step.
const holdTimeout = 10 * time.Second

// Hold runs the holder until its input ends.
func Hold(target netip.Addr, in io.Reader, out io.Writer) error {
	h := holder{targets: map[string]string{
		"tcp":  netip.AddrPortFrom(target, PortEcho).String(),
		"udp":  netip.AddrPortFrom(target, PortUDPEcho).String(),
		"sctp": netip.AddrPortFrom(target, PortEcho).String(),
	}}
	replies := json.NewEncoder(out)
	commands := json.NewDecoder(in)
	for {
		var c HoldCommand
		if err := commands.Decode(&c); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("hold: %w", err)
		}
		h.atOnce = cmp.Or(c.AtOnce, 32)
		var reply HoldReply
		switch c.Op {
		case "open":
			reply = h.open(cmp.Or(c.Network, "tcp"), c.N)
		case "ping":
			reply = h.ping()
		case "close":
			reply = h.close(c.N)
		default:
			return fmt.Errorf("hold: unknown command %q", c.Op)
		}
		reply.Open = len(h.conns)
		if err := replies.Encode(reply); err != nil {
			return fmt.Errorf("hold: %w", err)
		}
	}
}

type holder struct {
	targets map[string]string // by network
	atOnce  int
	conns   []line
}

// line is a connection, a UDP session or an association.
type line interface {
	io.ReadWriteCloser
	SetDeadline(time.Time) error
}

func (h *holder) dial(network string) (line, error) {
	if network == "sctp" {
		return dialSCTP(h.targets[network])
	}
	return net.DialTimeout(network, h.targets[network], holdTimeout)
}

func (h *holder) open(network string, n int) HoldReply {
	fresh := make([]line, n)
	reply := h.each(fresh, func(int) (line, error) {
		conn, err := h.dial(network)
		if err != nil {
			return nil, err
		}
		if err := ping(conn); err != nil {
			_ = conn.Close()
			return nil, err
		}
		return conn, nil
	})
	for _, conn := range fresh {
		if conn != nil {
			h.conns = append(h.conns, conn)
		}
	}
	return reply
}

func (h *holder) ping() HoldReply {
	before := h.conns
	after := make([]line, len(before))
	reply := h.each(after, func(i int) (line, error) {
		if err := ping(before[i]); err != nil {
			_ = before[i].Close()
			return nil, err
		}
		return before[i], nil
	})
	h.conns = h.conns[:0]
	for _, conn := range after {
		if conn != nil {
			h.conns = append(h.conns, conn)
		}
	}
	return reply
}

func (h *holder) close(n int) HoldReply {
	n = min(n, len(h.conns))
	for _, conn := range h.conns[:n] {
		_ = conn.Close()
	}
	h.conns = append([]line(nil), h.conns[n:]...)
	return HoldReply{Good: n}
}

// each fills the list by calling step for every index, a few at once.
func (h *holder) each(list []line, step func(int) (line, error)) HoldReply {
	var (
		mu      sync.Mutex
		latency Histogram
		reply   = HoldReply{Errors: map[string]int{}}
		work    = make(chan int)
		wg      sync.WaitGroup
	)
	for range h.atOnce {
		wg.Go(func() {
			for i := range work {
				begin := now()
				conn, err := step(i)
				took := now() - begin
				mu.Lock()
				if err != nil {
					reply.Errors[cause(err)]++
				} else {
					reply.Good++
					list[i] = conn
					latency.Record(took)
				}
				mu.Unlock()
			}
		})
	}
	for i := range list {
		work <- i
	}
	close(work)
	wg.Wait()
	reply.P50, reply.P99 = time.Duration(latency.Quantile(.5)), time.Duration(latency.Quantile(.99))
	reply.Max = time.Duration(latency.Max())
	return reply
}

// cause names an error without its addresses, so that equal causes are counted
// together.
func cause(err error) string {
	var errno syscall.Errno
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "timed out"
	case errors.As(err, &errno):
		return errno.Error()
	case errors.Is(err, io.EOF):
		return "closed by peer"
	}
	return err.Error()
}

// ping exchanges one message.
func ping(conn line) error {
	if err := conn.SetDeadline(time.Now().Add(holdTimeout)); err != nil {
		return err
	}
	message := bytes.Repeat([]byte("h"), MessageSize)
	if _, err := conn.Write(message); err != nil {
		return err
	}
	answer := make([]byte, MessageSize)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if !bytes.Equal(message, answer) {
		return errors.New("wrong response")
	}
	return nil
}
