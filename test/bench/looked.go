package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// lookedConns are the connections that are open while somebody looks.
const lookedConns = 9000

// look is a way of looking at the running proxy. It returns what to do at the end.
type look struct {
	name  string
	begin func(*looked) (end func(), err error)
}

// looked measures what looking costs.
type looked struct {
	*stage
	socket string
	client *http.Client
}

// looks are the ways of looking; the first is the page and the commands together.
func looks() []look {
	page := []string{
		"/v1/rates?by=client,service,endpoint&limit=1000", "/v1/tap?opens=true&rate=100",
		"/v1/history?by=service@5s", "/v1/connections?sort=-bytes&limit=100@2s", "/v1/status@5s",
	}
	parts := []look{
		{"page", requesting(page...)},
		{"top", running("top", "-o", "json")},
		{"conns", repeating(5*time.Second, "conns")},
		{"tap", running("tap", "--rate", "200")}, // as on a terminal
	}
	all := look{"all", func(l *looked) (func(), error) {
		var ends []func()
		for _, p := range parts {
			end, err := p.begin(l)
			if err != nil {
				return nil, err
			}
			ends = append(ends, end)
		}
		return func() {
			for _, end := range ends {
				end()
			}
		}, nil
	}}
	alone := append([]look{all}, parts...)
	alone = append(alone, look{"each record", running("tap")})
	for _, path := range page {
		alone = append(alone, look{strings.FieldsFunc(path, func(r rune) bool { return r == '?' || r == '@' })[0], requesting(path)})
	}
	return alone
}

// requesting reads answers of the admin API, whole. An answer that ends is asked for
// again after the pause behind its @.
func requesting(paths ...string) func(*looked) (func(), error) {
	return func(l *looked) (func(), error) {
		ctx, stop := context.WithCancel(context.Background())
		var running sync.WaitGroup
		for _, path := range paths {
			path, text, _ := strings.Cut(path, "@")
			pause, err := time.ParseDuration(text)
			if err != nil {
				pause = time.Second
			}
			running.Go(func() {
				for ctx.Err() == nil {
					l.request(ctx, path)
					select {
					case <-time.After(pause):
					case <-ctx.Done():
					}
				}
			})
		}
		return func() { stop(); running.Wait() }, nil
	}
}

func (l *looked) request(ctx context.Context, path string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sluice"+path, http.NoBody)
	if err != nil {
		l.b.note("%v", err)
		return
	}
	answer, err := l.client.Do(r)
	if err != nil {
		if ctx.Err() == nil {
			l.b.note("%s: %v", path, err)
		}
		return
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		l.b.note("%s: %s", path, answer.Status)
	}
	if _, err := io.Copy(io.Discard, answer.Body); err != nil && ctx.Err() == nil {
		l.b.note("%s: %v", path, err)
	}
}

// command is a subcommand of sluice that asks the relay. Its output goes nowhere.
func (l *looked) command(args ...string) world.Command {
	args = append([]string{"-c", `exec "$@" >/dev/null`, "sh", l.b.opts.builds.Sluice}, append(args, "--admin-socket", l.socket)...)
	return world.Command{Path: "sh", Args: args}
}

// running runs a subcommand of sluice that goes on.
func running(args ...string) func(*looked) (func(), error) {
	return func(l *looked) (func(), error) {
		p, err := l.world.Node.Start(l.command(args...))
		if err != nil {
			return nil, err
		}
		return p.Stop, nil
	}
}

// repeating runs a subcommand of sluice again and again.
func repeating(pause time.Duration, args ...string) func(*looked) (func(), error) {
	return func(l *looked) (func(), error) {
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ctx.Err() == nil {
				if _, err := l.world.Node.Run(l.command(args...), time.Minute); err != nil {
					l.b.note("%v", err)
				}
				select {
				case <-time.After(pause):
				case <-ctx.Done():
				}
			}
		}()
		return func() { stop(); <-done }, nil
	}
}

// lookAt measures connect-request-close beside 9,000 open connections, while nobody
// looks and while somebody does, in turns.
func (b *bench) lookAt(names string) error {
	nobody := look{"nobody", func(*looked) (func(), error) { return func() {}, nil }}
	wanted := strings.Split(names, ",")
	all := slices.DeleteFunc(append(looks(), nobody), func(w look) bool { return !slices.Contains(wanted, w.name) })
	if len(all) != len(wanted) {
		return fmt.Errorf("-look %q: not all of that is known", names)
	}
	peers, _ := b.prepare()
	if len(peers) == 0 {
		return errors.New("the peer to watch cannot run here")
	}
	socket := filepath.Join(b.dir, "admin.sock")
	// Together the open connections and the load's are most of what the limit of
	// descriptors allows: beyond it connections wait, and no service has a limit below it.
	s, err := b.openStage(peers[0], []string{
		"--admin-socket", socket, "--max-connections-per-service", "1000000", "--max-connections-per-namespace", "1000000",
	})
	if err != nil {
		return err
	}
	defer s.close()
	h, err := s.hold()
	if err != nil {
		return err
	}
	defer h.close()
	if opened, err := h.do(load.HoldCommand{Op: "open", N: lookedConns, AtOnce: 200}); err != nil || opened.Good != lookedConns {
		return errors.Join(fmt.Errorf("%d of %d connections opened: %v", opened.Good, lookedConns, opened.Errors), err)
	}
	l := &looked{stage: s, socket: socket, client: &http.Client{Transport: client.Transport(socket)}}
	fmt.Printf("connect-request-close beside %d open connections, %d rounds of %v; ratios to nobody looking, with quartiles\n\n", lookedConns, b.opts.rounds, b.opts.measure)
	var base, baseCPU []float64
	rates, cpus := make(map[string][]float64), make(map[string][]float64)
	for round := range b.opts.rounds {
		for _, w := range all {
			// Each has a measurement of nobody beside it, before it or after it in turns.
			var pair [2]look
			without := round % 2
			pair[without], pair[1-without] = nobody, w
			var rate, cpu [2]float64
			for i, each := range pair {
				b.now = fmt.Sprintf("round %d, %s", round+1, each.name)
				if rate[i], cpu[i], err = l.measure(each); err != nil {
					return err
				}
			}
			base, baseCPU = append(base, rate[without]), append(baseCPU, cpu[without])
			rates[w.name] = append(rates[w.name], rate[1-without]/rate[without])
			cpus[w.name] = append(cpus[w.name], cpu[1-without]/cpu[without])
		}
	}
	fmt.Printf("nobody: %.0f connections a second, %.2f s of the relay's CPU for 100,000\n\n", median(base), median(baseCPU))
	fmt.Printf("%-20s %24s %24s\n", "who looks", "rate", "relay's CPU/connection")
	for _, w := range all {
		fmt.Printf("%-20s %24s %24s\n", w.name, spread(rates[w.name]), spread(cpus[w.name]))
	}
	return nil
}

// measure measures the load while somebody looks.
func (l *looked) measure(w look) (rate, cpu float64, err error) {
	end, err := w.begin(l)
	if err != nil {
		return 0, 0, err
	}
	defer end()
	r, err := l.load(load.Spec{Kind: load.Churn, Clients: 32, Close: load.ServerCloses})
	if err != nil {
		return 0, 0, err
	}
	return r.Rate, per100k(r.Relay, r.Count), l.clean(r)
}

func quartile(values []float64, n int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[(len(sorted)-1)*n/4]
}

func spread(values []float64) string {
	return fmt.Sprintf("%.3f (%.3f - %.3f)", quartile(values, 2), quartile(values, 1), quartile(values, 3))
}
