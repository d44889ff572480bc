package e2e

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestSlowEndpointIsNamed: of three endpoints, one takes half a second for each answer.
// sluice slow names it first, and says that its answer is late and not its handshake.
func TestSlowEndpointIsNamed(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 3)
			for _, b := range lab.Backends[1:] {
				b.EchoTCP(t, 8080)
			}
			answerAfter(t, lab.Backends[0], time.Second/2)
			a := &algorithms{t: t, lab: lab, vips: map[string]string{}}
			p := newProxy(t, lab.Node)
			a.write(p, "slow", "", "")
			p.start("--datapath", path)
			ended := make(chan struct{})
			var clients sync.WaitGroup
			for range 4 {
				clients.Go(func() {
					for {
						select {
						case <-ended:
							return
						default:
							_, _ = lab.Client.Ask("tcp", a.vips["slow"]+":80")
						}
					}
				})
			}
			want := fmt.Sprintf(`"endpoint":"%s:8080"`, lab.Backends[0].IPv4)
			wait.For(t, "the slow endpoint", startTimeout, func() error {
				out, err := sluice(t, lab, "slow", "--for", "2s", "-o", "json")
				if first, _, _ := strings.Cut(out, "\n"); err != nil || !strings.Contains(first, want) || !strings.Contains(first, `"late":"answer"`) {
					return fmt.Errorf("%v, want %s and a late answer: %s", err, want, out)
				}
				return nil
			})
			close(ended)
			clients.Wait()
			p.stop()
		})
	}
}

// answerAfter serves port 8080 as an echo server that waits before it says its name.
func answerAfter(t *testing.T, h *netns.Host, pause time.Duration) {
	h.ServeTCP(t, ":8080", func(c *net.TCPConn) {
		<-time.After(pause)
		if _, err := io.WriteString(c, "slow\n"); err == nil {
			_, _ = io.Copy(c, c)
		}
	})
}
