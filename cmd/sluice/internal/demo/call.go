package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// callPatience bounds connect, and each answer: as long as the proxy goes on trying
// endpoints.
const callPatience = 15 * time.Second

// call is an open connection of a client. Its results go into its visit.
type call struct {
	visit *visit
	conn  net.Conn
	in    *bufio.Reader
	began time.Time
}

// errRefused says that connect itself was refused.
var errRefused = errors.New("connection refused")

// dial connects a client to a service. If connect is refused, it returns errRefused
// and adds nothing to the ledger; the ledger has every other result.
func (s *show) dial(ctx context.Context, client int, svc *shopService, f service.Family) (*call, error) {
	c, err := s.world.call(ctx, client, svc, f)
	if errors.Is(err, errRefused) {
		return nil, errRefused
	}
	s.ledger.add(c.visit)
	return c, err
}

// call connects a client to a service. If connect is refused, it returns errRefused
// and no call.
func (w *world) call(ctx context.Context, client int, svc *shopService, f service.Family) (*call, error) {
	vip := svc.vip(f)
	c := &call{visit: &visit{client: client, service: svc, vip: vip}, began: time.Now()}
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	conn, err := w.dial(ctx, client, vip)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, errRefused
	}
	if err != nil {
		c.visit.err = fmt.Errorf("connect: %w", err)
		return c, c.visit.err
	}
	c.conn, c.in = conn, bufio.NewReader(&meter{conn, &c.visit.received})
	if from, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		ap := from.AddrPort()
		c.visit.from = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return c, nil
}

// call is dial where being refused is a failure.
func (s *show) call(ctx context.Context, client int, svc *shopService, f service.Family) *call {
	c, err := s.dial(ctx, client, svc, f)
	if errors.Is(err, errRefused) {
		c = &call{visit: &visit{client: client, service: svc, vip: svc.vip(f), err: err}}
		s.ledger.add(c.visit)
	}
	return c
}

// ask sends a request and reads the whole answer, the name of a backend. What
// goes wrong is in the visit too.
func (c *call) ask() (string, error) {
	if c.visit.err != nil {
		return "", c.visit.err
	}
	name, err := c.exchange()
	if err != nil {
		c.visit.err = err
		return "", err
	}
	if c.visit.answer == "" {
		c.visit.answer, c.visit.took = name, time.Since(c.began)
	}
	return name, nil
}

func (c *call) exchange() (string, error) {
	if err := c.conn.SetDeadline(time.Now().Add(callPatience)); err != nil {
		return "", err
	}
	n, err := fmt.Fprintf(c.conn, "GET / HTTP/1.1\r\nHost: %s.%s\r\nUser-Agent: sluice-demo\r\n\r\n", c.visit.service.name, manifestNamespace)
	c.visit.sent += uint64(n)
	if err != nil {
		return "", fmt.Errorf("request: %w", err)
	}
	response, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return "", fmt.Errorf("answer: %w", err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	if err != nil {
		return "", fmt.Errorf("answer: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("answer: %s", response.Status)
	}
	return strings.TrimSpace(string(body)), nil
}

// hangUp closes the connection.
func (c *call) hangUp() {
	if c.conn != nil {
		_ = c.conn.Close()
	}
}

// visit makes a connection, asks once and hangs up.
func (s *show) visit(ctx context.Context, client int, svc *shopService, f service.Family) *visit {
	c := s.call(ctx, client, svc, f)
	defer c.hangUp()
	_, _ = c.ask() // the visit has the error
	return c.visit
}

// visits makes n connections one after the other.
func (s *show) visits(ctx context.Context, n, client int, svc *shopService, f service.Family) []*visit {
	var list []*visit
	for range n {
		list = append(list, s.visit(ctx, client, svc, f))
	}
	return list
}

// meter counts what is read.
type meter struct {
	io.Reader
	bytes *uint64
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	*m.bytes += uint64(n)
	return n, err
}
