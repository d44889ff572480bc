package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/procstat"
)

// What a page is looked at with: Services, endpoints of each, new connections a second.
const (
	watchedServices = 300
	watchedEach     = 10
	watchedRate     = 1000
	watchedClients  = 100                 // connections at a time, at most
	watchedRest     = 5 * time.Second / 2 // until a view has come to rest
	watchedOpening  = 2 * time.Second     // a view takes, at most
	watchedPaused   = 5                   // how much longer a paused view is measured
	pagePatience    = 30 * time.Second    // for what takes no certain time
)

// podRange has the endpoints.
var podRange = netip.MustParsePrefix("10.3.0.0/16")

// watch is a way of having the page open.
type watch struct {
	name  string
	hash  string // the view; empty for no page
	pause bool
}

// rest returns how long the view takes to come to rest.
func (w watch) rest() time.Duration {
	if w.hash == "" || w.pause {
		return 3 * watchedRest
	}
	return watchedRest
}

// length returns how long the view is measured. A browser that has fallen idle collects its garbage
// once, some ten seconds later, in 60 to 140 ms: a short measurement has all of it or nothing.
func (w watch) length(measure time.Duration) time.Duration {
	if w.pause {
		return watchedPaused * measure
	}
	return measure
}

// watches are all ways. Before each second one nobody looks.
var watches = []watch{
	{"map", "#/map", false}, {"map paused", "#/map", true}, {"services", "#/services", false}, {"endpoints", "#/endpoints", false},
	{"connections", "#/connections", false}, {"records", "#/records", false}, {"records paused", "#/records", true},
}

// watched measures what an open page takes, of cores.
type watched struct {
	*stage
	web     *exec.Cmd // sluice web
	url     string
	browser *browser
	views   []watch
}

// watchPage measures the CPU that the proxy, sluice web and the browser take while the page
// is open, at a steady rate of new connections.
func (b *bench) watchPage(names string) error {
	var views []watch
	for _, v := range watches {
		if names == "" || slices.Contains(strings.Split(names, ","), v.name) {
			views = append(views, v)
		}
	}
	if len(views) == 0 {
		return fmt.Errorf("no view is called %q", names)
	}
	if _, err := os.Stat(chromium); err != nil {
		return fmt.Errorf("%w: test/web/install-deps.sh installs it", err)
	}
	peers, _ := b.prepare()
	if len(peers) == 0 {
		return errors.New("the peer to watch cannot run here")
	}
	socket := filepath.Join(b.dir, "admin.sock")
	s, err := b.openStage(peers[0], []string{"--admin-socket", socket})
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.world.Pods(podRange); err != nil {
		return err
	}
	if s.relay.Targets, err = s.addServices(); err != nil {
		return err
	}
	w := &watched{stage: s, views: views}
	defer w.close()
	if err := w.openPage(socket); err != nil {
		return err
	}
	fmt.Printf("%d Services x %d endpoints, %d connections a second, %s; %d rounds of %v: shares of a core in %%, with quartiles\n\n",
		watchedServices, watchedServices*watchedEach, watchedRate, s.peer.Name, b.opts.rounds, b.opts.measure)
	shares := make(map[string]*[4][]float64)
	var rates []float64
	for round := range b.opts.rounds {
		rate, err := w.round(round, shares)
		if err != nil {
			return err
		}
		rates = append(rates, rate)
	}
	fmt.Printf("%.0f connections a second\n\n%-18s %20s %20s %20s %20s\n", median(rates), "view", "proxy, more", "sluice web", "browser", "proxy, nobody looks")
	for _, v := range w.views {
		fmt.Printf("%-18s", v.name)
		for _, each := range shares[v.name] {
			fmt.Printf(" %20s", fmt.Sprintf("%.1f (%.1f - %.1f)", quartile(each, 2), quartile(each, 1), quartile(each, 3)))
		}
		fmt.Println()
	}
	return nil
}

// round measures each way once, under one load.
func (w *watched) round(n int, shares map[string]*[4][]float64) (rate float64, err error) {
	type ended struct {
		result *load.Result
		err    error
	}
	done := make(chan ended, 1)
	var whole time.Duration
	for i, v := range w.views {
		whole += watchedRest + v.rest() + v.length(w.b.opts.measure) + watchedOpening
		if i%2 == 0 {
			whole += watch{}.rest() + w.b.opts.measure + watchedOpening
		}
	}
	go func() {
		r, err := w.load(load.Spec{
			Kind: load.Churn, Clients: watchedClients, Every: watchedClients * time.Second / watchedRate, Close: load.ServerCloses,
			Threads: 1, Sources: w.world.Clients, Warmup: time.Second, Measure: whole,
		})
		done <- ended{r, err}
	}()
	var without [3]float64
	for i, v := range w.views {
		w.b.now = fmt.Sprintf("round %d, %s", n+1, v.name)
		if i%2 == 0 {
			if without, err = w.measure(watch{}); err != nil {
				return 0, fmt.Errorf("%s: %w", w.b.now, err)
			}
		}
		with, err := w.measure(v)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", w.b.now, err)
		}
		fmt.Fprintf(os.Stderr, "%s: proxy %.1f after %.1f, sluice web %.1f, browser %.1f after %.1f\n", w.b.now, with[0], without[0], with[1], with[2], without[2])
		if shares[v.name] == nil {
			shares[v.name] = new([4][]float64)
		}
		for i, share := range []float64{with[0] - without[0], with[1], with[2], without[0]} {
			shares[v.name][i] = append(shares[v.name][i], share)
		}
	}
	if len(done) > 0 {
		w.b.note("the load has ended before the last measurement")
	}
	e := <-done
	if e.err != nil {
		return 0, e.err
	}
	return e.result.Rate, w.clean(e.result)
}

// measure returns the shares of a core that proxy, sluice web and browser take.
func (w *watched) measure(v watch) (shares [3]float64, err error) {
	url := "about:blank"
	if v.hash != "" {
		url = w.url + v.hash
	}
	if err := w.browser.visit(url); err != nil {
		return shares, err
	}
	if v.hash != "" {
		if err := w.browser.await(`/[0-9]/.test(document.querySelector("#strip .value")?.textContent)`); err != nil {
			return shares, err
		}
	}
	if v.pause {
		time.Sleep(watchedRest) // it shows something by then
		if err := w.browser.await(`(document.getElementById("pause").click(), true)`); err != nil {
			return shares, err
		}
	}
	time.Sleep(v.rest())
	before, err := w.cpu()
	if err != nil {
		return shares, err
	}
	began := time.Now()
	time.Sleep(v.length(w.b.opts.measure))
	after, err := w.cpu()
	took := time.Since(began)
	for i := range shares {
		shares[i] = 100 * (after[i] - before[i]).Seconds() / took.Seconds()
	}
	return shares, err
}

// cpu returns what proxy, sluice web and browser have used.
func (w *watched) cpu() (used [3]time.Duration, err error) {
	tree, err := procstat.Tree(w.browser.pid())
	if err != nil {
		return used, err
	}
	for i, pids := range [][]int{w.relay.PIDs, {w.web.Process.Pid}, tree} {
		if used[i], err = procstat.CPU(pids); err != nil {
			return used, err
		}
	}
	return used, nil
}

// openPage starts sluice web and a browser, where the browser reaches it.
func (w *watched) openPage(socket string) error {
	w.web = exec.Command(w.b.opts.builds.Sluice, "web", "--listen", "127.0.0.1:0", "--admin-socket", socket)
	said, err := w.web.StderrPipe()
	if err != nil {
		return err
	}
	w.web.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := w.web.Start(); err != nil {
		return err
	}
	late := time.AfterFunc(pagePatience, func() { _ = w.web.Process.Kill() })
	var all strings.Builder
	for lines := bufio.NewScanner(said); w.url == "" && lines.Scan(); {
		fmt.Fprintln(&all, lines.Text())
		w.url = pageURL.FindString(lines.Text())
	}
	late.Stop()
	if w.url == "" {
		return fmt.Errorf("sluice web: %s", all.String())
	}
	go func() { _, _ = io.Copy(io.Discard, said) }()
	w.browser, err = openBrowser(filepath.Join(w.b.dir, "chromium"))
	return err
}

func (w *watched) close() {
	if w.browser != nil {
		w.browser.close()
	}
	if w.web != nil && w.web.Process != nil {
		_ = w.web.Process.Kill()
		_ = w.web.Wait()
	}
}

var pageURL = regexp.MustCompile(`http://\S+/`)

// addServices gives the relay the Services, and returns their addresses when the last one
// answers.
func (s *stage) addServices() ([]netip.Addr, error) {
	var all strings.Builder
	vip, pod := s.world.VIP, podRange.Addr()
	var vips []netip.Addr
	for i := range watchedServices {
		vip = vip.Next()
		vips = append(vips, vip)
		fmt.Fprintf(&all, `---
apiVersion: v1
kind: Service
metadata: {name: s%[1]d, namespace: team-%[2]d}
spec: {clusterIP: %[3]s, clusterIPs: [%[3]s], ports: [{name: once, port: %[4]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s%[1]d-1, namespace: team-%[2]d, labels: {kubernetes.io/service-name: s%[1]d}}
addressType: IPv4
ports: [{name: once, port: %[4]d}]
endpoints:
`, i, i%20, vip, load.PortOnce)
		for range watchedEach {
			pod = pod.Next()
			fmt.Fprintf(&all, "- {addresses: [%s], conditions: {ready: true}, nodeName: server, targetRef: {kind: Pod, namespace: team-%d, name: pod-%s}}\n",
				pod, i%20, strings.ReplaceAll(pod.String(), ".", "-"))
		}
	}
	dir := filepath.Join(s.dir, "config", "manifests")
	draft := filepath.Join(dir, ".many.yaml")
	if err := os.WriteFile(draft, []byte(all.String()), 0o644); err != nil {
		return nil, err
	}
	if err := os.Rename(draft, filepath.Join(dir, "many.yaml")); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(pagePatience); ; time.Sleep(20 * time.Millisecond) {
		err := s.world.Client.Do(func() error {
			conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(vip, load.PortOnce).String(), time.Second)
			if err != nil {
				return err
			}
			return conn.Close()
		})
		if err == nil {
			return vips, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the Services do not answer: %w; %s", err, s.relay.Log())
		}
	}
}
