// Package cause has labs in which one of three endpoints of a Service has a trouble. Tests ask the
// commands and the page which one it is.
package cause

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	// Pod is the one with the trouble, on the lab's first backend.
	Pod = "default/web-1"
	// Address is the Service's.
	Address = "10.96.0.10:80"
	// DialTimeouts has connections give up soon. It is the value of a flag.
	DialTimeouts = "500ms,2s"

	held = 4 // connections that fill an endpoint
)

// Cause is a trouble.
type Cause struct {
	Name       string
	annotation string // of the Service, which fills the endpoint
	// spoil has the endpoint serve, or not, and gives it its trouble.
	spoil func(t testing.TB, node, bad *netns.Host)
	// Command is what docs/observing.md names, and Says what its row about the pod says.
	Command, Says string
	// Sort is the order of /v1/rates that has the pod first, and Column that of the page's endpoints.
	Sort, Column string
	// Fails is set if connections fail, or attempts: the page's map marks the pod then.
	Fails bool
}

// All are all causes.
var All = []Cause{
	{Name: "slow", spoil: func(t testing.TB, _, bad *netns.Host) {
		AnswerAfter(t, bad, time.Second/2)
	}, Command: "slow --for 2s", Says: "answer", Sort: "first", Column: "First byte 99 %"},
	{Name: "resetting", spoil: func(t testing.TB, _, bad *netns.Host) {
		bad.ServeTCP(t, ":8080", func(c *net.TCPConn) { _ = c.SetLinger(0) })
	}, Command: "failures", Says: "endpoint_reset", Sort: "failed", Column: "Failed/s", Fails: true},
	failing("refusing", "refused", func(testing.TB, *netns.Host, *netns.Host) {}),
	failing("unreachable", "unreachable", func(t testing.TB, node, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		run(t, node, "ip", "route", "add", "unreachable", bad.IPv4.String()+"/32")
	}),
	{Name: "full", annotation: fmt.Sprintf("sluice.dev/max-connections-per-endpoint: '%d'", held), spoil: func(t testing.TB, _, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
	}, Command: "endpoints service=default/web", Says: "full, with 4 connections", Sort: "open", Column: "State"},
	failing("dropped", "dropped", func(t testing.TB, node, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		drop := "ip daddr " + bad.IPv4.String() + " tcp dport 8080 drop"
		node.NFT(t, "table inet rules {\n chain out { type filter hook output priority 0; "+drop+"; }\n chain forward { type filter hook forward priority 0; "+drop+"; }\n}")
	}),
	failing("absent", "unreachable", func(t testing.TB, _, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		run(t, bad, "ip", "link", "set", "eth0", "arp", "off")
	}),
	failing("silent", "timeout", func(t testing.TB, _, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		bad.NFT(t, "table inet rules {\n chain in { type filter hook input priority 0; tcp dport 8080 drop; }\n}")
	}),
}

// failing is a cause of failed attempts, each of which another endpoint makes good.
func failing(name, says string, spoil func(t testing.TB, node, bad *netns.Host)) Cause {
	return Cause{Name: name, spoil: spoil, Command: "failures", Says: says, Sort: "failed", Column: "Attempts failed/s", Fails: true}
}

func run(t testing.TB, h *netns.Host, command ...string) {
	t.Helper()
	if out, err := h.Command(t, command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", command, err, out)
	}
}

// AnswerAfter serves port 8080 as an echo server that waits before it says its name.
func AnswerAfter(t testing.TB, h *netns.Host, pause time.Duration) {
	h.ServeTCP(t, ":8080", func(c *net.TCPConn) {
		<-time.After(pause)
		if _, err := io.WriteString(c, "slow\n"); err == nil {
			_, _ = io.Copy(c, c)
		}
	})
}

// Lab returns a lab that is spoilt, without a proxy.
func (c *Cause) Lab(t testing.TB) *netns.Lab {
	t.Helper()
	lab := netns.NewLab(t, 3)
	for _, b := range lab.Backends[1:] {
		b.EchoTCP(t, 8080)
	}
	c.spoil(t, lab.Node, lab.Backends[0])
	return lab
}

// Manifest returns the Service and its endpoints.
func (c *Cause) Manifest(lab *netns.Lab) string {
	ip, _, _ := strings.Cut(Address, ":")
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default, annotations: {%s}}
spec: {clusterIP: %s, clusterIPs: [%[2]s], ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
`, c.annotation, ip)
	for i, h := range lab.Backends {
		fmt.Fprintf(&b, "- {addresses: [%s], conditions: {ready: true}, nodeName: backend, targetRef: {kind: Pod, namespace: default, name: web-%d}}\n", h.IPv4, i+1)
	}
	return b.String()
}

// Play has clients ask the Service until the test ends, once a proxy serves it.
func (c *Cause) Play(t testing.TB, lab *netns.Lab) {
	t.Helper()
	if c.annotation != "" {
		fill(t, lab)
	}
	ended := make(chan struct{})
	var clients sync.WaitGroup
	t.Cleanup(func() { close(ended); clients.Wait() })
	for range 4 {
		clients.Go(func() {
			for {
				select {
				case <-ended:
					return
				case <-time.After(5 * time.Millisecond):
					_, _ = lab.Client.Ask("tcp", Address)
				}
			}
		})
	}
}

// fill opens connections until the endpoint has as many as it may have, and closes those to
// others.
func fill(t testing.TB, lab *netns.Lab) {
	t.Helper()
	for kept, tries := 0, 0; kept < held; tries++ {
		conn, err := lab.Client.Dial("tcp", Address)
		if err != nil || tries > 50 {
			t.Fatal(tries, err)
		}
		server, err := netns.AskOn(conn)
		must.OK(t, err)
		if !strings.HasPrefix(server, lab.Backends[0].Name()+":") {
			_ = conn.Close()
			continue
		}
		kept++
		t.Cleanup(func() { _ = conn.Close() })
	}
}
