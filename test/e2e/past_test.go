package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise7_ThePastMoves: after each take-over, the records of ended connections and the history
// are those of before, and no two records have one id.
func TestPromise7_ThePastMoves(t *testing.T) {
	t.Parallel()
	const takeOvers, each = 3, 5
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	flags := []string{"--datapath", "relay", "--history", "--web-bind-address", ":10261"}
	p.start(flags...)
	page, opened := p.scraper(), 0
	connect := func() {
		for range each {
			must.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
			opened++
		}
	}
	get := func(path string, to any) error {
		resp, err := page.Get("http://127.0.0.1:10261" + path)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return json.NewDecoder(resp.Body).Decode(to)
	}
	check := func() error {
		out, err := sluice(t, lab, "log", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		ids := make(map[uint64]bool)
		for line := range strings.Lines(out) {
			if !strings.HasPrefix(line, "{") {
				continue // since when there are records
			}
			var r struct{ ID uint64 }
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				return fmt.Errorf("%s: %w", line, err)
			}
			ids[r.ID] = true
		}
		if len(ids) != opened {
			return fmt.Errorf("%d ids of %d connections:\n%s", len(ids), opened, out)
		}
		var h api.History
		if err := get("/v1/history?by=service", &h); err != nil {
			return err
		}
		if len(h.Series) != 1 {
			return fmt.Errorf("%d series", len(h.Series))
		}
		sum := 0.0
		for i, rate := range h.Series[0].Opened {
			sum += rate * h.Seconds[i]
		}
		if int(sum+0.5) != opened {
			return fmt.Errorf("%v of %d connections are in the history", sum, opened)
		}
		return nil
	}
	connect()
	wait.For(t, "the records and the history", startTimeout, check)
	for range takeOvers {
		next := *p
		next.start(append(flags, "--take-over")...)
		p.awaitLog("another sluice has taken over")
		p.waitExit()
		p = &next
		wait.For(t, "the records and the history of before", startTimeout, check)
		connect()
		wait.For(t, "the records and the history", startTimeout, check)
	}
	p.stop()
}
