package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/cause"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestSlowEndpointIsNamed: of four endpoints, one takes half a second for each answer, and
// one never answers. sluice slow names both, and says that the one's answer is late and not
// its handshake, and that the other sends none.
func TestSlowEndpointIsNamed(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 4)
		for _, b := range lab.Backends[2:] {
			b.EchoTCP(t, 8080)
		}
		cause.AnswerAfter(t, lab.Backends[0], time.Second/2)
		lab.Backends[1].ServeTCP(t, ":8080", func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
		a := &algorithms{t: t, lab: lab, vips: map[string]string{}}
		p := newProxy(t, lab.Node)
		a.write(p, "slow", "", "")
		p.start("--datapath", path)
		ended := make(chan struct{})
		var clients sync.WaitGroup
		for range 6 {
			clients.Go(func() {
				for {
					select {
					case <-ended:
						return
					default:
						askBriefly(lab, a.vips["slow"]+":80")
					}
				}
			})
		}
		want := []string{
			fmt.Sprintf("%s:8080 no answer", lab.Backends[1].IPv4),
			fmt.Sprintf("%s:8080 answer", lab.Backends[0].IPv4),
		}
		wait.For(t, "the slow endpoints", startTimeout, func() error {
			out, err := sluice(t, lab, "slow", "--for", "2s", "-o", "json")
			var got []string
			for line := range strings.Lines(out) {
				var e struct{ Endpoint, Late string }
				if json.Unmarshal([]byte(line), &e) == nil {
					got = append(got, e.Endpoint+" "+e.Late)
				}
			}
			// On a busy machine, others may follow.
			if err != nil || len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
				return fmt.Errorf("%v, want %q: %s", err, want, out)
			}
			return nil
		})
		close(ended)
		clients.Wait()
		p.stop()
	})
}

// askBriefly sends a request and waits a second and a half for the answer.
func askBriefly(lab *netns.Lab, address string) {
	c, err := lab.Client.Dial("tcp", address)
	if err != nil {
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(3 * time.Second / 2))
	if _, err := c.Write([]byte("hello")); err == nil {
		_, _ = c.Read(make([]byte, 100))
	}
}
