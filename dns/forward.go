package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	// forwardPatience is how long one resolver may take; resolvers of the C library wait
	// for 5 s.
	forwardPatience = 2 * time.Second
	// mostForwarded bounds the questions that wait for resolvers; further ones over UDP get
	// no answer.
	mostForwarded = 512
)

// forwarder asks other resolvers. Each question has a socket of its own, and so a random
// port, and a random ID: both keep forged answers out.
type forwarder struct {
	resolvers []netip.AddrPort
	waiting   chan struct{} // a token for each question
}

func newForwarder(resolvers []netip.AddrPort) *forwarder {
	return &forwarder{resolvers: resolvers, waiting: make(chan struct{}, mostForwarded)}
}

// run sends the reply of a question that waits for a resolver. It reports false if too many
// wait.
func (f *forwarder) run(ctx context.Context, later func(context.Context) []byte, send func([]byte)) bool {
	select {
	case f.waiting <- struct{}{}:
	default:
		return false
	}
	go func() {
		defer func() { <-f.waiting }()
		if reply := later(ctx); reply != nil {
			send(reply)
		}
	}()
	return true
}

// ask returns the first answer to a message. A resolver that cannot answer, or refuses to,
// does not end the search: the others may know the name. If none does, ask returns the last
// reply, or nil.
func (f *forwarder) ask(ctx context.Context, message []byte, network string) (last []byte) {
	id := binary.BigEndian.Uint16(message)
	for _, at := range f.resolvers {
		reply := exchange(ctx, at, message, network)
		if reply != nil {
			binary.BigEndian.PutUint16(reply, id)
			if last = reply; !unable(dnsmessage.RCode(reply[3] & 0xf)) {
				return reply
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return last
}

// unable reports whether a code says nothing of the name that was asked for. The C library
// asks its next resolver at the same codes.
func unable(code dnsmessage.RCode) bool {
	return code == dnsmessage.RCodeServerFailure || code == dnsmessage.RCodeNotImplemented || code == dnsmessage.RCodeRefused
}

// exchange asks one resolver. It changes the message's ID.
func exchange(ctx context.Context, at netip.AddrPort, message []byte, network string) []byte {
	ctx, cancel := context.WithTimeout(ctx, forwardPatience)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, at.String())
	if err != nil {
		return nil
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	id := uint16(rand.Uint32())
	binary.BigEndian.PutUint16(message, id)
	if network == "tcp" {
		if writeMessage(c, message) != nil {
			return nil
		}
		if reply, err := readMessage(c); err == nil && answers(reply, message, id) {
			return reply
		}
		return nil
	}
	if _, err := c.Write(message); err != nil {
		return nil
	}
	reply := make([]byte, 65535)
	for {
		n, err := c.Read(reply)
		if err != nil {
			return nil
		}
		if answers(reply[:n], message, id) {
			return reply[:n]
		}
	}
}

// answers reports whether a reply is one to a message.
func answers(reply, message []byte, id uint16) bool {
	var p, asked dnsmessage.Parser
	h, err := p.Start(reply)
	if err != nil || !h.Response || h.ID != id {
		return false
	}
	if _, err := asked.Start(message); err != nil {
		return false
	}
	want, err := asked.Question()
	if err != nil {
		return false
	}
	got, err := p.Question()
	return err == nil && strings.EqualFold(got.Name.String(), want.Name.String()) && got.Type == want.Type && got.Class == want.Class
}

// complete adds to an answer what a resolver says of the name that it ends with. It
// reports false if none answers.
func (f *forwarder) complete(ctx context.Context, a *answer, t dnsmessage.Type) bool {
	q := query{header: dnsmessage.Header{RecursionDesired: true}, question: dnsmessage.Question{Type: t, Class: dnsmessage.ClassINET}}
	var err error
	if q.question.Name, err = dnsmessage.NewName(a.alias); err != nil {
		return false
	}
	question := message{header: q.header}
	asked, err := question.pack(&q, 0)
	if err != nil {
		return false
	}
	var p dnsmessage.Parser
	var h dnsmessage.Header
	var reply []byte
	for _, network := range []string{"udp", "tcp"} {
		if reply = f.ask(ctx, asked, network); reply == nil {
			return false
		}
		if h, err = p.Start(reply); err != nil {
			return false
		}
		if !h.Truncated {
			break
		}
	}
	if p.SkipAllQuestions() != nil {
		return false
	}
	for {
		r, err := readRecord(&p, reply)
		if err != nil {
			a.code = h.RCode
			return errors.Is(err, dnsmessage.ErrSectionDone)
		}
		a.records = append(a.records, r)
	}
}
