package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestManifestsEditedWhileClientsConnect changes everything that can change about
// one service, and adds and removes others, while clients connect. Every
// connection must be answered by an endpoint of its service.
func TestManifestsEditedWhileClientsConnect(t *testing.T) {
	t.Parallel()
	const edits = 30
	lab := netns.NewLab(t, 3)
	lab.EchoTCP(t, 8080)
	lab.EchoTCP(t, 9090)
	web := webOn(lab)
	// It keeps one endpoint of each family in all changes.
	anchor := on(8080, lab.Backends[0])
	web.endpoints = anchor
	p := startProxy(t, lab, []webService{web})

	var stop atomic.Bool
	visits := make(chan []visit, 4)
	targets := addresses(80, vip4, vip6)
	for range cap(visits) {
		go func() {
			var list []visit
			for i := 0; !stop.Load(); i++ {
				list = append(list, ask(lab.Client, targets[i%2]))
			}
			visits <- list
		}()
	}
	extras := 0
	for i := range edits {
		edited := web
		edited.affinity = []int{0, 100}[i/2%2]
		edited.endpoints = append(append([]netip.AddrPort{}, anchor...), on(8080, lab.Backends[1:1+i%3]...)...)
		p.apply(edited)
		extra := webService{name: fmt.Sprintf("extra-%d", i), vips: []string{fmt.Sprintf("10.96.1.%d", i+1)}, port: 90, endpoints: on(9090, lab.Backends[2])[:1]}
		p.apply(extra)
		extras++
		p.awaitMetrics(extra.name+" is in force", func(m map[string]float64) bool { return m[metricPorts] == float64(1+extras) })
		if name, err := lab.Client.Ask("tcp", addresses(90, extra.vips...)[0]); err != nil || name != "b3:9090" {
			t.Errorf("%s: got %q, %v", extra.name, name, err)
		}
		if i%2 == 1 {
			p.remove(extra.name)
			extras--
		}
	}
	stop.Store(true)
	total := 0
	for range cap(visits) {
		for _, v := range <-visits {
			total++
			if v.err != nil || !strings.HasSuffix(v.name, ":8080") {
				t.Errorf("%s: got %q, %v", v.client, v.name, v.err)
			}
		}
	}
	t.Logf("%d connections during %d edits", total, edits)
	p.stop()
}

// TestBrokenManifestsAreNamedAndTheRestServed reads every broken manifest of
// test/manifests/broken, one that is too large, and a valid one. Tests of
// source/manifests compare the exact messages.
func TestBrokenManifestsAreNamedAndTheRestServed(t *testing.T) {
	t.Parallel()
	// These are valid.
	fine := []string{"good.yaml", "comments-only.yaml", "empty.yaml", "other-kinds.yaml", "same-address-1.yaml"}
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	files, err := filepath.Glob("../manifests/broken/*")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d broken manifests, %v", len(files), err)
	}
	var broken []string
	for _, file := range files {
		text := must.Read(t, file)
		name := filepath.Base(file)
		p.write(name, string(text))
		if !slices.Contains(fine, name) {
			broken = append(broken, name)
		}
	}
	const large = 5 << 20
	p.write("large.yaml", strings.Repeat("# "+strings.Repeat("x", 61)+"\n", large/64))
	p.start()
	for _, address := range addresses(80, vip4, vip6) {
		check.OKf(t, must.Err(lab.Client.Ask("tcp", address)), "%s", address)
	}
	said := p.stderr.String()
	for _, name := range append(broken, "large.yaml", "same-address-2.yaml:1: Service default/same-address-2: ClusterIP") {
		check.Containsf(t, said, name, "no line names %s", name)
	}
	for _, name := range fine {
		if strings.Contains(said, name) {
			t.Errorf("a line names %s", name)
		}
	}
	p.stop()
}

// TestLastGoodContentStaysInForce breaks a file, repairs it, and deletes it.
func TestLastGoodContentStaysInForce(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	web := webOn(lab)
	web.endpoints = on(8080, lab.Backends[0])
	p := startProxy(t, lab, []webService{web})
	target := addresses(80, vip4)[0]

	p.write("web.yaml", "kind: Service\n  apiVersion: v1\n")
	wait.Until(t, "the log names the file", startTimeout, func() bool { return p.stderr.Contains("web.yaml") })
	check.OKf(t, onlyOn(lab.Client, target, "b1:8080"), "while the file is broken")
	wait.For(t, "the status names the file", startTimeout, func() error {
		if out, err := sluice(t, lab, "status"); err == nil || !strings.Contains(out, "NOT all is in force: 1 manifest is in error: web.yaml:") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	web.endpoints = on(8080, lab.Backends[1])
	p.apply(web)
	wait.For(t, "the mended file is in force", startTimeout, func() error { return onlyOn(lab.Client, target, "b2:8080") })
	wait.For(t, "the status is in order", startTimeout, func() error {
		_, err := sluice(t, lab, "status")
		return err
	})
	p.remove("web")
	wait.For(t, "the deleted file's service is gone", startTimeout, func() error { return unanswered(lab.Client, target) })
	p.stop()
}
