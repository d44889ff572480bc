//go:build programs

package programs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPublishAndSubscribe publishes messages through the Service to two
// subscribers, which stay connected also without messages. Each must get every
// message, once and in order.
func TestPublishAndSubscribe(t *testing.T) {
	const messages = 5000
	w := newWorld(t, 1, 1883)
	dir := debian.Directory(t)
	config := filepath.Join(dir, "mosquitto.conf")
	text := fmt.Sprintf("listener %d\nallow_anonymous true\npersistence false\nmax_queued_messages 0\n", w.port)
	must.OK(t, os.WriteFile(config, []byte(text), 0o644))
	s := w.serve(w.Backends[0], dir, "mosquitto", "-v", "-c", config)
	options := func(vip string, more ...string) []string {
		return append([]string{"-h", vip, "-p", strconv.Itoa(int(w.port)), "-t", "news", "-q", "1"}, more...)
	}
	outs := make([]*output.Text, len(vips))
	ends := make([]chan error, len(vips))
	for i, vip := range vips {
		cmd := debian.As(w.Client.Command(t, debian.Find(t, "mosquitto_sub"), options(vip, "-k", "5", "-C", strconv.Itoa(2*messages))...), "/")
		outs[i], ends[i] = &output.Text{}, make(chan error, 1)
		cmd.Stdout, cmd.Stderr = outs[i], outs[i]
		must.OK(t, cmd.Start())
		go func() { ends[i] <- cmd.Wait() }()
	}
	wait.True(t, "both have subscribed", func() bool { return strings.Count(s.log.String(), "Sending SUBACK") == len(vips) })
	var want strings.Builder
	for round, vip := range vips {
		var lines strings.Builder
		for n := range messages {
			fmt.Fprintf(&lines, "message %d of round %d\n", n, round)
		}
		want.WriteString(lines.String())
		cmd := debian.As(w.Client.Command(t, debian.Find(t, "mosquitto_pub"), options(vip, "-l")...), "/")
		cmd.Stdin = strings.NewReader(lines.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("mosquitto_pub: %v\n%s", err, out)
		}
		if round == 0 && full() {
			pause(longPause())
		}
	}
	for i, vip := range vips {
		select {
		case err := <-ends[i]:
			if err != nil || outs[i].String() != want.String() {
				t.Errorf("the subscriber at %s: %v, %d bytes of %d, or others", vip, err, len(outs[i].String()), want.Len())
			}
		case <-time.After(time.Minute):
			t.Errorf("the subscriber at %s still waits: %d bytes of %d", vip, len(outs[i].String()), want.Len())
		}
	}
}
