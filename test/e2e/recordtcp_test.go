package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// resent are the segments of a connection that were sent again, to each side and by the client.
type resent struct{ client, endpoint, lost uint64 }

func resentOf(c *api.Connection) (s resent) {
	for _, n := range []struct {
		to   *uint64
		from *uint64
	}{{&s.client, c.ClientRetransmits}, {&s.endpoint, c.EndpointRetransmits}, {&s.lost, c.ClientLost}} {
		if n.from != nil {
			*n.to = *n.from
		}
	}
	return s
}

// TestRecordsSayWhatTCPSays: with --record-tcp, the record of a connection says as much as sluice conns
// did while it was open, also if another process has taken it over.
func TestRecordsSayWhatTCPSays(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.EchoTCP(t, 8080)
			p := prepareProxy(t, lab, []webService{webOn(lab)})
			flags := []string{"--datapath", path, "--record-tcp", "--access-log-opens"}
			p.start(flags...)
			for _, h := range []*netns.Host{lab.Client, lab.Backends[0]} { // they lose what the node has sent
				h.NFT(t, "add table inet loss; add chain inet loss in { type filter hook input priority 0; }; "+
					"add rule inet loss in meta l4proto tcp meta length > 200 numgen inc mod 8 5 drop")
			}
			lab.Client.Lose(t, "eth0", 200, 8) // and what the client sends does not come
			conn := lab.Client.Connect(t, "tcp", addresses(80, vip4)[0])
			var open resent
			wait.For(t, "segments are sent again", startTimeout, func() error {
				const size = 64 << 10
				failed := make(chan error, 1)
				go func() { failed <- must.Err(conn.Write(make([]byte, size))) }()
				must.OK(t, must.Err(io.ReadFull(conn, make([]byte, size))))
				must.OK(t, <-failed)
				c := awaitListed(t, lab, "state=open")
				if open = resentOf(&c); c.Path != path || open.client < 3 || open.endpoint < 3 || (open.lost < 3) != (path == "relay") {
					return fmt.Errorf("%s: %+v", c.Path, open)
				}
				return nil
			})
			next := *p
			next.start(append(flags, "--take-over")...)
			p.awaitLog("another sluice has taken over")
			p.waitExit()
			must.OK(t, conn.Close())
			next.awaitRecords(2) // its end and its beginning
			var ended, opened api.Connection
			lines := bytes.Split(must.Read(t, p.accessLog), []byte("\n"))
			must.OK(t, json.Unmarshal(lines[0], &opened))
			must.OK(t, json.Unmarshal(lines[1], &ended))
			if s := resentOf(&ended); s.client < open.client || s.endpoint < open.endpoint || s.lost < open.lost || ended.Path != path {
				t.Errorf("the record has %+v, it had %+v: %s", s, open, lines[1])
			}
			for _, c := range []*api.Connection{&opened, &ended} {
				if c.IdleUS == nil || c.ClientIdleUS == nil || c.EndpointIdleUS == nil || c.EndpointRTTUS == nil || *c.EndpointRTTUS <= 0 {
					t.Errorf("a record says less: %+v", c)
				}
			}
			if ended.ClientRTTUS == nil || *ended.ClientRTTUS <= 0 || (ended.ClientWindow == nil) != (path == "kernel") {
				t.Errorf("the record says less: %s", lines[1])
			}
			for _, question := range [][]string{{"log", "-o", "json", "retransmits>=6 rtt>0"}, {"story", fmt.Sprint(ended.ID), "-o", "json"}} {
				out, err := sluice(t, lab, question...)
				var told api.Connection
				for line := range strings.Lines(out) {
					if strings.HasPrefix(line, "{") && err == nil {
						err = json.Unmarshal([]byte(line), &told)
					}
				}
				if err != nil || resentOf(&told) != resentOf(&ended) || told.ID != ended.ID {
					t.Errorf("%v: %v, %s", question, err, out)
				}
			}
			next.stop()
		})
	}
}

// TestRecordsWithoutTCP: without --record-tcp, no record has such fields, and filters for them are errors.
func TestRecordsWithoutTCP(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	must.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	p.awaitRecords(1)
	if text := must.Read(t, p.accessLog); bytes.Contains(text, []byte("idle_us")) {
		t.Errorf("%s", text)
	}
	for _, command := range []string{"log", "tap"} {
		out, err := sluice(t, lab, command, "retransmits>0")
		check.Equalf(t, err != nil && strings.Contains(out, "--record-tcp"), true, "%s takes the filter: %v: %s", command, err, out)
	}
	p.stop()
}
