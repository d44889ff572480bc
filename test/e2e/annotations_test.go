package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestAnnotations: each annotation that has no test of its own does what
// docs/configuration.md says, on both data paths.
func TestAnnotations(t *testing.T) {
	t.Parallel()
	onPaths(t, playAnnotations)
}

func playAnnotations(t *testing.T, path string) {
	lab := netns.NewLab(t, 2)
	b1, b2 := lab.Backends[0], lab.Backends[1]
	b1.EchoTCP(t, 8080)
	b2.EchoTCP(t, 8080)
	b1.EchoTCP(t, 9090)
	swallow(t, b2, 9090)
	b1.EchoUDP(t, 8080)
	open := make(chan struct{})
	b1.ServeTCP(t, ":7070", func(c *net.TCPConn) {
		_, _ = io.Copy(io.Discard, c)
		<-open
	})
	t.Cleanup(func() { close(open) })

	p := newProxy(t, lab.Node)
	vips := map[string]string{}
	write := func(name, annotation string, endpoints []netip.AddrPort) webService {
		vips[name] = fmt.Sprintf("10.96.0.%d", 10+len(vips))
		s := webService{name: name, vips: []string{vips[name]}, port: 80, endpoints: endpoints}
		text := s.annotated(annotation)
		if strings.HasPrefix(name, "udp") {
			text = byUDP(text)
		}
		p.write(name+".yaml", text)
		return s
	}
	write("logged", "sluice.dev/access-log: all", on(8080, b1))
	write("unlogged", "sluice.dev/access-log: 'off'", on(8080, b1))
	write("relayed", "sluice.dev/datapath: relay", on(8080, b1))
	write("hole", "sluice.dev/dial-timeouts: '2s,10s'", on(9090, b1, b2))
	write("half", "sluice.dev/half-closed-timeout: 1s", on(7070, b1))
	write("udp-quiet", "sluice.dev/udp-timeout: 1s", on(8080, b1))
	write("udp-once", "sluice.dev/udp-responses: '1'", on(8080, b1))
	near := write("near", "", on(8080, b1, b2))
	text := near.annotated("sluice.dev/topology-keys: topology.kubernetes.io/zone")
	p.write("near.yaml", strings.Replace(text, "nodeName: backend", "nodeName: node", 1)) // that of b1
	p.write("nodes.yaml", nodeYAML("node", []netip.Addr{lab.Node.IPv4}, netns.NodePods)+"---\n"+
		nodeYAML("backend", []netip.Addr{b2.IPv4}, netns.Node2Pods))
	p.start("--datapath", path, "--access-log-udp", "all")

	ask := func(name string) string {
		t.Helper()
		server, err := lab.Client.Ask("tcp", vips[name]+":80")
		must.OKf(t, err, "%s", name)
		return server
	}
	for _, name := range []string{"unlogged", "logged", "relayed"} {
		ask(name)
	}
	for range 6 {
		check.Equalf(t, ask("near"), "b1:8080", "the endpoint for the client near")
	}
	ask("hole")
	ask("hole") // in turn, one of them tries the black hole first
	for _, name := range []string{"udp-quiet", "udp-once"} {
		c, err := lab.Client.Dial("udp", vips[name]+":80")
		must.OK(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(startTimeout))
		if _, err = c.Write([]byte("hello")); err == nil {
			_, err = c.Read(make([]byte, 100))
		}
		must.OKf(t, err, "%s", name)
	}
	half := must.Get(lab.Client.Dial("tcp", vips["half"]+":80"))(t)
	defer half.Close()
	must.OK(t, half.(*net.TCPConn).CloseWrite())

	by := map[string][]record{}
	wait.For(t, "the records", stopTimeout, func() error {
		records, err := readRecords(p.accessLog)
		clear(by)
		for _, r := range records {
			by[r.Service] = append(by[r.Service], r)
		}
		if want := 1 + 1 + 6 + 2 + 1 + 1 + 1; err == nil && len(records) < want {
			err = fmt.Errorf("%d of %d", len(records), want)
		}
		return err
	})
	of := func(name string) []record { return by["default/"+name+":http"] }
	if n := len(of("unlogged")); n > 0 {
		t.Errorf("access-log off: %d records", n)
	}
	failed := 0
	for _, r := range of("hole") {
		for _, a := range r.Failed {
			if failed++; a.Endpoint.Addr() != b2.IPv4 || a.US < 2e6 || a.US > 9e6 {
				t.Errorf("dial-timeouts of 2s, 10s: an attempt at %s lasts %d us", a.Endpoint, a.US)
			}
		}
	}
	check.Equalf(t, failed, 1, "dial-timeouts: failed attempts of %+v", of("hole"))
	const patience = 20 * time.Second // the defaults are longer
	for name, end := range map[string]string{"half": "idle", "udp-quiet": "idle", "udp-once": "responses"} {
		for _, r := range of(name) {
			if r.End != end || r.DurationUS > patience.Microseconds() {
				t.Errorf("%s ends with %s after %d us, want %s", name, r.End, r.DurationUS, end)
			}
		}
	}
	for service, records := range by {
		want := path
		if service == "default/relayed:http" || service == "default/udp-once:http" {
			want = "relay"
		}
		for _, r := range records {
			check.Equalf(t, r.Path, want, "%s: the path of a connection", service)
		}
	}
	p.stop()
}

// TestBadAnnotations: a bad value in a manifest is named with file and line, and counted. The
// file's last content stays in force. A bad value of an annotation of another proxy is named
// and counted, and leaves the Service with the default.
func TestBadAnnotations(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		p := newProxy(t, lab.Node)
		web := webService{name: "web", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends...)}
		p.write("web.yaml", web.annotated("sluice.dev/balancer: random"))
		foreign := webService{name: "foreign", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends...)}
		p.write("foreign.yaml", foreign.annotated("service.cilium.io/lb-algorithm: fastest"))
		p.start("--datapath", path)
		p.awaitLog("foreign.yaml:1: Service default/foreign: annotation service.cilium.io/lb-algorithm: balancer \\\"fastest\\\": unknown")
		for i, annotation := range []string{"hold: soon", "dial-timeouts: 1s;2s", "eject-after: never", "balancer: fastest", "drain: '5'"} {
			key, _, _ := strings.Cut(annotation, ":")
			p.write("web.yaml", web.annotated("sluice.dev/"+annotation))
			p.awaitLog("web.yaml:4: Service default/web: metadata.annotations[sluice.dev/" + key + "]")
			for _, vip := range []string{vip4, "10.96.0.11"} {
				check.OKf(t, must.Err(lab.Client.Ask("tcp", vip+":80")), "%d, %s", i, annotation)
			}
		}
		values, err := p.metrics()
		if err != nil || values["sluice_manifest_files_in_error"] != 1 || values["sluice_config_problems"] != 1 {
			t.Errorf("%v: %v files in error and %v problems are counted, want 1 and 1", err, values["sluice_manifest_files_in_error"], values["sluice_config_problems"])
		}
		p.stop()
	})
}

// annotationTests has the test of each annotation through real sockets.
var annotationTests = map[string]string{
	"access-log":                   "TestAnnotations",
	"balancer":                     "TestAlgorithms",
	"balancer-hash":                "TestAlgorithms",
	"slow-start":                   "TestSlowStart",
	"topology-keys":                "TestAnnotations",
	"udp-timeout":                  "TestAnnotations",
	"datapath":                     "TestAnnotations",
	"eject-after":                  "TestEndpointThatResetsIsEjected",
	"dial-timeouts":                "TestAnnotations",
	"idle-timeout":                 "TestAlgorithms",
	"half-closed-timeout":          "TestAnnotations",
	"drain":                        "TestDrainAnnotation",
	"hold":                         "TestHeldConnections",
	"max-connections":              "TestLimitsAndQueue",
	"max-connections-per-endpoint": "TestLimitsAndQueue",
	"queue-timeout":                "TestLimitsAndQueue",
	"proxy-protocol":               "TestProxyProtocolIsSent",
	"accept-proxy-protocol":        "TestProxyProtocolIsAccepted",
	"rebalance":                    "TestRebalance",
	"sctp-streams":                 "TestProxyFollowsTheStreamsAnnotation",
	"udp-responses":                "TestAnnotations",
}

// TestAnnotationsHaveTests expects each annotation of docs/configuration.md's table to have a test
// that exists, on both data paths. That of sctp-streams runs in a guest.
func TestAnnotationsHaveTests(t *testing.T) {
	text := must.Read(t, "../../docs/configuration.md")
	sources := testSources(t)
	rows := regexp.MustCompile("(?m)^\\| `sluice.dev/([a-z-]+)` \\|").FindAllStringSubmatch(string(text), -1)
	for _, row := range rows {
		name := annotationTests[row[1]]
		switch source, exists := sources["e2e."+name]; {
		case exists && !strings.Contains(source, `"relay", "kernel"`) && !strings.Contains(source, "onPaths(t, "):
			t.Errorf("%s: %s does not run on both data paths", row[1], name)
		case !exists && (row[1] != "sctp-streams" || sources["sctp."+name] == ""):
			t.Errorf("%s: its test %q does not exist", row[1], name)
		}
	}
	check.Equalf(t, len(rows), len(annotationTests), "annotations that have a row")
}

// awaitTold waits until sluice explain says something of a connection to a Service.
func (p *proxy) awaitTold(lab *netns.Lab, vip, what string) {
	p.t.Helper()
	wait.For(p.t, "sluice explain says "+what, stopTimeout, func() error {
		said, err := sluice(p.t, lab, "explain", "--from", lab.Client.IPv4.String(), "--to", vip+":80")
		if err == nil && !strings.Contains(said, what) {
			err = errors.New(said)
		}
		return err
	})
}
