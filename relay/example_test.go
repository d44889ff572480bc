package relay_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/relay"
)

// The least that makes a proxy of a relay: it accepts one client and joins it with
// one endpoint.
type proxy struct {
	loop     *poll.Loop
	worker   *relay.Worker
	listener int
	endpoint netip.AddrPort
	client   int
	upstream int
	reg      poll.Registration
	link     relay.Link
	over     chan string
}

// HandleEvents accepts a client, then hears that the endpoint has answered.
func (p *proxy) HandleEvents(tag uint8, ready poll.Events) {
	if tag == 1 {
		p.worker.Start(&p.link, relay.Socket{FD: p.client}, relay.Socket{FD: p.upstream, Reg: p.reg, Ready: ready}, p)
		return
	}
	p.client, _, _ = sys.Accept(p.listener)
	p.upstream, _ = sys.ConnectTCP(p.endpoint, netip.AddrPort{}, sys.ConnectOptions{})
	p.reg, _ = p.loop.Add(p.upstream, 1, relay.Watch, p)
}

// LinkEnded is told that both sockets are closed.
func (p *proxy) LinkEnded(l *relay.Link, end relay.End) {
	p.over <- fmt.Sprintf("%s: %d bytes up, %d bytes down", end, l.BytesUp(), l.BytesDown())
}

func Example() {
	endpoint, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer endpoint.Close()
	go func() { // echoes
		if c, err := endpoint.Accept(); err == nil {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()

	loop, err := poll.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	p := &proxy{
		loop:     loop,
		worker:   relay.New(relay.Config{Splice: true}).NewWorker(loop),
		endpoint: netip.MustParseAddrPort(endpoint.Addr().String()),
		over:     make(chan string, 1),
	}
	if p.listener, err = sys.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"), sys.ListenOptions{}); err != nil {
		fmt.Println(err)
		return
	}
	defer sys.Close(p.listener)
	if _, err := loop.Add(p.listener, 0, poll.Readable, p); err != nil {
		fmt.Println(err)
		return
	}
	go func() { _ = loop.Run() }()

	address, _ := sys.LocalAddr(p.listener)
	c, err := net.Dial("tcp", address.String())
	if err != nil {
		fmt.Println(err)
		return
	}
	_, _ = io.WriteString(c, "hello")
	_ = c.(*net.TCPConn).CloseWrite() // the endpoint sees the end, and answers all the same
	answer, _ := io.ReadAll(c)
	fmt.Printf("%s\n", answer)
	_ = c.Close()
	fmt.Println(<-p.over)
	loop.Post(p.worker.Close)
	loop.Stop()
	// Output:
	// hello
	// client_fin: 5 bytes up, 5 bytes down
}
