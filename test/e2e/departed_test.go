package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestDrainAnnotation: connections to an endpoint that went, or that does not serve any more,
// are reset once the time of sluice.dev/drain has passed, and not before. All others stay:
// those to other endpoints, to one that is back in time, and of Services without the
// annotation, until they get it.
func TestDrainAnnotation(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			const drain = 2 * time.Second
			annotation := "sluice.dev/drain: " + drain.String()
			lab := netns.NewLab(t, 2)
			lab.EchoTCP(t, 8080)
			p := newProxy(t, lab.Node)
			web := webOn(lab)
			later := webService{name: "later", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends...)}
			p.write("web.yaml", web.annotated(annotation))
			p.apply(later)
			p.start("--datapath", path)
			first, second := heldOn(t, lab, addresses(80, vip4)[0]), heldOn(t, lab, addresses(80, vip6)[0])
			others := heldOn(t, lab, "10.96.0.11:80")

			// The endpoint goes for one family, and serves no more for the other one.
			fewer := web
			fewer.endpoints = append(on(8080, lab.Backends[0]), on(8080, lab.Backends[1])[1])
			text := fewer.annotated(annotation)
			at := strings.LastIndex(text, "ready: true")
			text = text[:at] + "ready: false, serving: false" + text[at+len("ready: true"):]
			began := time.Now()
			p.write("web.yaml", text)
			wait.For(t, "new connections avoid the endpoint", startTimeout, func() error {
				if err := onlyOn(lab.Client, addresses(80, vip4)[0], "b1:8080"); err != nil {
					return err
				}
				return onlyOn(lab.Client, addresses(80, vip6)[0], "b1:8080")
			})
			for _, c := range []net.Conn{first["b2:8080"], second["b2:8080"]} {
				err := ended(c)
				if took := time.Since(began); !isReset(err) || took < drain {
					t.Errorf("%s: %v after %v, want a reset after %v", c.LocalAddr(), err, took, drain)
				}
			}
			alive(t, []net.Conn{first["b1:8080"], second["b1:8080"], others["b1:8080"], others["b2:8080"]})
			wait.For(t, "the records say so", stopTimeout, func() error {
				records, err := readRecords(p.accessLog)
				n := 0
				for _, r := range records {
					if r.End == "drained" && r.Service == "default/web:http" && r.Path == path {
						n++
					}
				}
				if err == nil && n != 2 {
					err = fmt.Errorf("%d of 2", n)
				}
				return err
			})
			values, err := p.metrics()
			counted := 0.0
			for name, n := range values {
				if strings.Contains(name, `end="drained"`) {
					counted += n
				}
			}
			if counted != 2 {
				t.Errorf("%v are counted, want 2: %v", counted, err)
			}

			// Without the annotation they stay, also while the other Service's are reset. With
			// it, the time begins.
			gone := later
			gone.endpoints = on(8080, lab.Backends[0])
			p.apply(gone)
			wait.For(t, "new connections avoid the endpoint", startTimeout, func() error {
				return onlyOn(lab.Client, "10.96.0.11:80", "b1:8080")
			})
			alive(t, []net.Conn{others["b2:8080"]})
			began = time.Now()
			p.write("later.yaml", gone.annotated(annotation))
			if err, took := ended(others["b2:8080"]), time.Since(began); !isReset(err) || took < drain {
				t.Errorf("%v after %v, want a reset after %v", err, took, drain)
			}
			alive(t, []net.Conn{first["b1:8080"], second["b1:8080"], others["b1:8080"]})
			p.stop()
		})
	}
}

// heldOn opens connections until one to each of the two endpoints is open.
func heldOn(t *testing.T, lab *netns.Lab, address string) map[string]net.Conn {
	t.Helper()
	list := make(map[string]net.Conn)
	wait.For(t, "a connection to each endpoint", startTimeout, func() error {
		c, err := lab.Client.Dial("tcp", address)
		if err != nil {
			return err
		}
		name, err := netns.AskOn(c)
		if err != nil || list[name] != nil {
			_ = c.Close()
			return fmt.Errorf("%d of 2: %w", len(list), err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if list[name] = c; len(list) < len(lab.Backends) {
			return errNotYet
		}
		return nil
	})
	return list
}

// TestDrainAnnotationAfterARestart: kernel flows of a killed proxy, whose endpoint went while
// none ran, are reset by the next one.
func TestDrainAnnotationAfterARestart(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	p := newProxy(t, lab.Node)
	web := webOn(lab)
	p.write("web.yaml", web.annotated("sluice.dev/drain: 1s"))
	p.start("--datapath", "kernel")
	held := heldOn(t, lab, addresses(80, vip4)[0])
	p.kill()
	web.endpoints = on(8080, lab.Backends[0])
	p.write("web.yaml", web.annotated("sluice.dev/drain: 1s"))
	p.start("--datapath", "kernel")
	if err := ended(held["b2:8080"]); !isReset(err) {
		t.Errorf("%v, want a reset", err)
	}
	alive(t, []net.Conn{held["b1:8080"]})
	p.stop()
}

// TestDrainSurvivesARestart: what sluice drain says holds from the next process's first connection
// on, after a stop and after a kill, until --back or sluice cleanup.
func TestDrainSurvivesARestart(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	only := func(what string, want bool) {
		t.Helper()
		seen := map[string]bool{}
		for range 4 {
			name := must.Get(lab.Client.Ask("tcp", addresses(80, vip4)[0]))(t)
			seen[name] = true
		}
		if seen["b2:8080"] == want || !seen["b1:8080"] {
			t.Errorf("%s: served by %v", what, seen)
		}
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := sluice(t, lab, args...); err != nil {
			t.Fatalf("sluice %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	pod, other := lab.Backends[1].IPv4.String(), "default/web-4" // of the same host, IPv6
	run("drain", pod)
	run("drain", other)
	p.stop()
	p.start()
	only("after a stop", true)
	p.kill()
	p.start()
	only("after a kill", true)
	out, err := sluice(t, lab, "drain")
	if err != nil || !strings.Contains(out, pod) || !strings.Contains(out, other) {
		t.Errorf("%v: %s", err, out)
	}
	run("drain", pod, "--back")
	only("taken back", false)
	p.stop()
	p.start()
	only("taken back, after a stop", false)
	if out, err = sluice(t, lab, "drain"); err != nil || strings.Contains(out, pod) || !strings.Contains(out, other) {
		t.Errorf("%v: %s", err, out)
	}
	p.stop()
	says(t, lab, "removed what sluice drain has kept", "cleanup", "--bpf-root", bpfRoot())
	p.start()
	if out, err = sluice(t, lab, "drain"); err != nil || strings.Contains(out, other) {
		t.Errorf("after cleanup: %v: %s", err, out)
	}
	p.stop()
}
