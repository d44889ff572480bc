package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// cause is a lab in which one of three endpoints has a trouble: default/web-1 on b1, whose
// route and rules can be spoilt, and which does not listen by itself.
type cause struct {
	name       string
	annotation string
	spoil      func(t *testing.T, lab *netns.Lab, bad *netns.Host)
	// The command of docs/observing.md, and what its row about the pod says.
	command, says string
	// page is the figure that the page's first row of endpoints has by an order.
	sort string
}

var causes = []cause{
	{name: "slow", spoil: func(t *testing.T, _ *netns.Lab, bad *netns.Host) {
		answerAfter(t, bad, 500*1e6)
	}, command: "slow --for 2s", says: "answer", sort: "first"},
	{name: "resetting", spoil: func(t *testing.T, _ *netns.Lab, bad *netns.Host) {
		bad.ServeTCP(t, ":8080", func(c *net.TCPConn) { _ = c.SetLinger(0) })
	}, command: "failures", says: "endpoint_reset", sort: "failed"},
	{name: "refusing", spoil: func(*testing.T, *netns.Lab, *netns.Host) {}, command: "failures", says: "refused", sort: "failed"},
	{name: "unreachable", spoil: func(t *testing.T, lab *netns.Lab, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		shell(t, lab.Node, "ip route add unreachable "+bad.IPv4.String()+"/32")
	}, command: "failures", says: "unreachable", sort: "failed"},
	{name: "full", annotation: "sluice.dev/max-connections-per-endpoint: '4'", spoil: func(t *testing.T, _ *netns.Lab, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
	}, command: "endpoints service=default/web", says: "full, with 4 connections", sort: "open"},
	{name: "dropped", spoil: func(t *testing.T, lab *netns.Lab, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		drop := "ip daddr " + bad.IPv4.String() + " tcp dport 8080 drop"
		lab.Node.NFT(t, "table inet rules {\n chain out { type filter hook output priority 0; "+drop+"; }\n chain forward { type filter hook forward priority 0; "+drop+"; }\n}")
	}, command: "failures", says: "dropped", sort: "failed"},
	{name: "absent", spoil: func(t *testing.T, _ *netns.Lab, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		shell(t, bad, "ip link set eth0 arp off")
	}, command: "failures", says: "unreachable", sort: "failed"},
	{name: "silent", spoil: func(t *testing.T, _ *netns.Lab, bad *netns.Host) {
		bad.EchoTCP(t, 8080)
		bad.NFT(t, "table inet rules {\n chain in { type filter hook input priority 0; tcp dport 8080 drop; }\n}")
	}, command: "failures", says: "timeout", sort: "failed"},
}

// TestQuestionNamesTheRightPod: one of three endpoints is slow, resets, refuses, cannot be
// reached, is full, has gone from its link or is silent, or a rule drops what goes there. The command that docs/observing.md
// gives names its pod first with the reason, and so does the page's API.
func TestQuestionNamesTheRightPod(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		for _, c := range causes {
			t.Run(path+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				c.play(t, path)
			})
		}
	}
}

func (c *cause) play(t *testing.T, path string) {
	lab := netns.NewLab(t, 3)
	bad := lab.Backends[0]
	for _, b := range lab.Backends[1:] {
		b.EchoTCP(t, 8080)
	}
	c.spoil(t, lab, bad)
	service := webService{name: "web", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends...)}
	p := newProxy(t, lab.Node)
	p.write("web.yaml", service.annotated(c.annotation))
	p.start("--datapath", path, "--web-bind-address=:10261", "--dial-timeouts=500ms,2s")
	address := addresses(80, vip4)[0]
	if c.name == "full" {
		c.fill(t, lab, bad, address)
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
				default:
					_, _ = lab.Client.Ask("tcp", address)
				}
			}
		})
	}
	wait.For(t, "sluice "+c.command+" names the pod", startTimeout, func() error {
		out, err := sluice(t, lab, strings.Fields(c.command)...)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		_, rows, _ := strings.Cut(out, "\n")
		for i, row := range strings.Split(rows, "\n") {
			switch {
			case !strings.Contains(row, "default/web-1"):
				return fmt.Errorf("row %d: want default/web-1 first, which is %s:\n%s", i+1, c.says, out)
			case strings.Contains(row, c.says):
				return nil
			}
		}
		return errors.New(out)
	})
	wait.For(t, "the page's first row is of the pod", startTimeout, func() error {
		r, err := p.scraper().Get("http://127.0.0.1:10261/v1/rates?by=service,endpoint&interval=2s&sort=" + c.sort)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		var f api.Frame
		if err := json.NewDecoder(r.Body).Decode(&f); err != nil || r.StatusCode != http.StatusOK {
			return fmt.Errorf("%s %w", r.Status, err)
		}
		if len(f.Rows) == 0 || f.Rows[0].Pod != "default/web-1" {
			return fmt.Errorf("the rows are %+v", f.Rows)
		}
		return nil
	})
}

// fill opens connections until the endpoint has as many as it may have, and closes those to
// others.
func (c *cause) fill(t *testing.T, lab *netns.Lab, bad *netns.Host, address string) {
	t.Helper()
	for kept, tries := 0, 0; kept < 4; tries++ {
		conn, err := lab.Client.Dial("tcp", address)
		if err != nil || tries > 50 {
			t.Fatal(tries, err)
		}
		server, err := netns.AskOn(conn)
		must.OK(t, err)
		if !strings.HasPrefix(server, bad.Name()+":") {
			_ = conn.Close()
			continue
		}
		kept++
		t.Cleanup(func() { _ = conn.Close() })
	}
}
