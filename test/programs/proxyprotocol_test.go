//go:build programs

package programs

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// configured runs a program with a configuration, which may have the placeholder DIR.
func (w *world) configured(h *netns.Host, program, config string, args ...string) *server {
	w.t.Helper()
	dir := debian.Directory(w.t)
	file := filepath.Join(dir, "config")
	must.OK(w.t, os.WriteFile(file, []byte(strings.ReplaceAll(config, "DIR", dir)), 0o644))
	for i := range args {
		args[i] = strings.ReplaceAll(strings.ReplaceAll(args[i], "DIR", dir), "FILE", file)
	}
	return w.serve(h, dir, program, args...)
}

// proxyProtocolServer runs nginx, which logs the client that PROXY headers name.
func (w *world) proxyProtocolServer(h *netns.Host) *server {
	w.t.Helper()
	return w.configured(h, "nginx", fmt.Sprintf(`daemon off;
pid DIR/pid;
master_process off;
error_log stderr;
events { worker_connections 512; }
http {
  log_format client 'client $proxy_protocol_addr $proxy_protocol_port';
  access_log DIR/access.log client;
  client_body_temp_path DIR/body; proxy_temp_path DIR/proxy; fastcgi_temp_path DIR/fastcgi; uwsgi_temp_path DIR/uwsgi; scgi_temp_path DIR/scgi;
  server {
    listen %[1]d proxy_protocol;
    listen [::]:%[1]d ipv6only=on proxy_protocol;
    location = /hello { return 200 "hello\n"; }
  }
}
`, w.port), "-e", "stderr", "-p", "DIR", "-c", "FILE")
}

// wantLogged expects the client in the server's access log.
func (w *world) wantLogged(s *server, client netip.AddrPort) {
	w.t.Helper()
	line := fmt.Sprintf("client %s %d\n", client.Addr(), client.Port())
	wait.For(w.t, s.name+" logs the client", wait.Patience, func() error {
		text, err := os.ReadFile(filepath.Join(s.dir, "access.log"))
		if err == nil && !strings.Contains(string(text), line) {
			err = fmt.Errorf("no %q in:\n%s", line, text)
		}
		return err
	})
}

// helloFrom asks once from a host, and returns the address that it asked from.
func (w *world) helloFrom(h *netns.Host, address string) (netip.AddrPort, error) {
	c, err := h.Dial("tcp", address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	body, err := get(c, "/hello")
	if err == nil {
		_, err = io.ReadAll(body)
		_ = body.Close()
	}
	return c.LocalAddr().(*net.TCPAddr).AddrPort(), err
}

// TestNginxReadsProxyHeaders: nginx logs the client's address and port from both versions. In
// front of it, a witness tells which version came.
func TestNginxReadsProxyHeaders(t *testing.T) {
	for version, begin := range map[string]string{"v1": "PROXY TCP", "v2": "\r\n\r\n\x00\r\nQUIT\n\x21"} {
		t.Run(version, func(t *testing.T) {
			w := newWorld(t, 1, 8081)
			s := w.proxyProtocolServer(w.Backends[0])
			begins := w.witness(w.Backends[0], 8080, 8081, len(begin))
			w.port = 8080
			w.annotate("sluice.dev/proxy-protocol: " + version)
			for _, vip := range vips {
				wait.For(t, "nginx answers", wait.Patience, func() error {
					client, err := w.helloFrom(w.Client, w.at(vip)) // fails until the annotation is in force
					if err == nil {
						w.wantLogged(s, client)
					}
					return err
				})
				for last := ""; last != begin; {
					select {
					case last = <-begins:
					case <-time.After(wait.Patience):
						t.Fatalf("no connection begins with %q, but with %q", begin, last)
					}
				}
			}
		})
	}
}

// witness listens on a port of a host and passes connections on to another port there. The
// channel gets the first bytes of each connection.
func (w *world) witness(h *netns.Host, from, to uint16, n int) <-chan string {
	w.t.Helper()
	l := must.Get(h.Listen("tcp", fmt.Sprintf(":%d", from)))(w.t)
	begins := make(chan string, 1000)
	var running sync.WaitGroup
	w.t.Cleanup(func() { _ = l.Close(); running.Wait() })
	pass := func(c net.Conn) {
		defer c.Close()
		head := make([]byte, n)
		if _, err := io.ReadFull(c, head); err != nil {
			return // a client of before the annotation
		}
		begins <- string(head)
		server, err := h.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", to))
		if err != nil {
			w.t.Errorf("nginx: %v", err)
			return
		}
		defer server.Close()
		_, _ = server.Write(head)
		running.Go(func() { _, _ = io.Copy(c, server); _ = c.Close() })
		_, _ = io.Copy(server, c)
	}
	running.Go(func() {
		netns.Accept(l, func(c net.Conn) {
			running.Go(func() { pass(c) })
		})
	})
	return begins
}

// TestHAProxyInFront: HAProxy sends headers of both versions to the Service, and nginx behind
// it logs HAProxy's client. Others than HAProxy get no answer.
func TestHAProxyInFront(t *testing.T) {
	w := newWorld(t, 2, 8080)
	s := w.proxyProtocolServer(w.Backends[0])
	w.Backends = w.Backends[:1]
	w.annotate("sluice.dev/proxy-protocol: v2, sluice.dev/accept-proxy-protocol: '10.1.0.2/32,fd00:1::2/128'")
	for i, send := range []string{"send-proxy", "send-proxy-v2"} {
		w.port = uint16(9000 + i)
		w.configured(w.Client, "haproxy", fmt.Sprintf(`defaults
  mode tcp
  timeout connect 60s
  timeout client 60s
  timeout server 60s
listen web
  bind :%[1]d
  bind :::%[1]d v6only
  server four %[2]s:8080 %[3]s
`, w.port, vips[0], send), "-db", "-f", "FILE")
		for _, at := range []netip.Addr{w.Client.IPv4, w.Client.IPv6} {
			wait.For(t, "nginx answers", wait.Patience, func() error {
				client, err := w.helloFrom(w.Node, netip.AddrPortFrom(at, w.port).String())
				if err == nil {
					w.wantLogged(s, client)
				}
				return err
			})
		}
	}
	w.port = 8080
	if _, err := w.helloFrom(w.Node, w.at(vips[0])); err == nil {
		t.Error("a client that is no load balancer is answered")
	}
}
