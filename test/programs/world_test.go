//go:build programs

package programs

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/proxy"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// The Service of every test.
var vips = []string{"10.96.0.10", "fd00:96::10"}

// full tells whether the tests may take minutes.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }

// pause stops a reader or a server for a time that is itself under test.
func pause(d time.Duration) { time.Sleep(d) }

// longPause is how long a client or a server stops: longer than any timeout after
// which it might count as lost.
func longPause() time.Duration {
	if full() {
		return 90 * time.Second
	}
	return 2 * time.Second
}

// world is a lab with a proxy that serves one Service.
type world struct {
	t *testing.T
	*netns.Lab
	port      uint16
	accessLog string
	annotated bool // the relay may serve
	proxy     *proxy.Proxy
}

// newWorld starts the proxy. All backends are endpoints, with the Service's port.
func newWorld(t *testing.T, backends int, port uint16, flags ...string) *world {
	t.Helper()
	return newWorldBy(t, nil, backends, port, flags...)
}

// newWorldBy is newWorld with a program that runs the proxy: with its own arguments,
// then the proxy and its arguments.
func newWorldBy(t *testing.T, program []string, backends int, port uint16, flags ...string) *world {
	t.Helper()
	t.Parallel()
	w := &world{t: t, Lab: netns.NewLab(t, backends), port: port, accessLog: filepath.Join(t.TempDir(), "access.log")}
	w.proxy = proxy.New(t, w.Node)
	w.annotate("")
	w.proxy.Start(program, append([]string{"--access-log", w.accessLog, "--access-log-format", "json", "--bpf-root", ""}, flags...)...)
	t.Cleanup(w.checkPaths)
	return w
}

// checkPaths expects that the kernel has forwarded each connection, as is the default.
func (w *world) checkPaths() {
	if w.annotated {
		return
	}
	text, _ := os.ReadFile(w.accessLog) // none: the records are elsewhere
	for line := range strings.Lines(string(text)) {
		var r struct{ End, Path string }
		if err := json.Unmarshal([]byte(line), &r); err != nil || r.Path != "kernel" {
			w.t.Errorf("the kernel has not forwarded this: %v, %s", err, line)
			return
		}
	}
}

// yaml returns the Service and its EndpointSlices.
func (w *world) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: program, namespace: default}
spec:
  clusterIP: %q
  clusterIPs: [%q, %q]
  ipFamilies: [IPv4, IPv6]
  ports: [{name: main, port: %d, protocol: TCP}]
`, vips[0], vips[0], vips[1], w.port)
	for _, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: program-%s, namespace: default, labels: {kubernetes.io/service-name: program}}
addressType: %s
ports: [{name: main, port: %d, protocol: TCP}]
endpoints:
`, strings.ToLower(family), family, w.port)
		for _, h := range w.Backends {
			a := h.IPv4
			if family == "IPv6" {
				a = h.IPv6
			}
			fmt.Fprintf(&b, "- {addresses: [%q], nodeName: elsewhere}\n", a)
		}
	}
	return b.String()
}

// annotate writes the Service with annotations.
func (w *world) annotate(annotations string) {
	w.t.Helper()
	w.annotated = w.annotated || annotations != ""
	text := strings.Replace(w.yaml(), "namespace: default}\n", "namespace: default, annotations: {"+annotations+"}}\n", 1)
	w.proxy.Write(text)
}

// at returns the Service's address of a family with its port.
func (w *world) at(vip string) string {
	return netip.AddrPortFrom(netip.MustParseAddr(vip), w.port).String()
}

// server is a program that serves on a host.
type server struct {
	t    *testing.T
	w    *world
	host *netns.Host
	name string
	args []string
	dir  string
	cmd  *netns.Cmd
	log  output.Text
}

// serve runs a program as nobody and waits until it accepts.
func (w *world) serve(h *netns.Host, dir, name string, args ...string) *server {
	w.t.Helper()
	s := &server{t: w.t, w: w, host: h, name: debian.Find(w.t, name), args: args, dir: dir}
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("%s on %s said:\n%s", name, h.Name(), &s.log)
		}
	})
	s.start()
	return s
}

// start runs it, or runs it again.
func (s *server) start() {
	s.t.Helper()
	s.cmd = debian.As(s.host.Command(s.t, s.name, s.args...), s.dir)
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	must.OK(s.t, s.cmd.Start())
	for _, a := range []netip.Addr{s.host.IPv4, s.host.IPv6} {
		wait.For(s.t, s.name+" accepts", 2*wait.Patience, func() error {
			c, err := s.w.Node.Dial("tcp", netip.AddrPortFrom(a, s.w.port).String())
			if err == nil {
				_ = c.Close()
			}
			return err
		})
	}
}

func (s *server) signal(signal syscall.Signal) {
	s.t.Helper()
	must.OK(s.t, s.cmd.Process.Signal(signal))
}

// end stops it by a signal and waits.
func (s *server) end(signal syscall.Signal) {
	s.t.Helper()
	s.signal(signal)
	_ = s.cmd.Wait()
}

// client runs a program on the client host and returns its output.
func (w *world) client(name string, args ...string) string {
	w.t.Helper()
	out, err := debian.As(w.Client.Command(w.t, debian.Find(w.t, name), args...), "/").CombinedOutput()
	if err != nil {
		w.t.Errorf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// want expects a text in a program's output.
func (w *world) want(out, text string) {
	w.t.Helper()
	check.Contains(w.t, out, text)
}

// attempt is one try of a client.
type attempt struct {
	began time.Time
	err   error
}

// load is clients that repeat something.
type load struct {
	mu   sync.Mutex
	all  []attempt // guarded by mu
	over chan struct{}
	wg   sync.WaitGroup
}

// newLoad starts clients, which go on until stop.
func newLoad(clients int, try func(i int) error) *load {
	l := &load{over: make(chan struct{})}
	for i := range clients {
		l.wg.Go(func() {
			for n := i; ; n++ {
				select {
				case <-l.over:
					return
				default:
				}
				a := attempt{began: time.Now()}
				a.err = try(n)
				l.mu.Lock()
				l.all = append(l.all, a)
				l.mu.Unlock()
			}
		})
	}
	return l
}

// served waits until so many more attempts have succeeded.
func (l *load) served(t *testing.T, more int) {
	t.Helper()
	count := func() (n int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, a := range l.all {
			if a.err == nil {
				n++
			}
		}
		return n
	}
	before := count()
	wait.True(t, "requests are served", func() bool { return count() >= before+more })
}

// stop ends the load and returns all attempts.
func (l *load) stop() []attempt {
	close(l.over)
	l.wg.Wait()
	return l.all
}

// judge expects every attempt that began after a moment to have succeeded.
func (w *world) judge(all []attempt, since time.Time) {
	w.t.Helper()
	late, failed, before := 0, 0, 0
	for _, a := range all {
		switch {
		case a.began.Before(since):
			if a.err != nil {
				before++
			}
		case a.err == nil:
			late++
		default:
			late++
			if failed++; failed <= 5 {
				w.t.Errorf("%v after: %v", a.began.Sub(since).Round(time.Millisecond), a.err)
			}
		}
	}
	w.t.Logf("%d attempts, %d of those under way failed; of %d that began later %d failed", len(all), before, late, failed)
	if late == 0 {
		w.t.Error("no attempt began later: the test proves nothing")
	}
}

// dial connects the client host to the Service.
func (w *world) dial(vip string) (*net.TCPConn, error) {
	c, err := w.Client.Dial("tcp", w.at(vip))
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.New("not TCP")
	}
	return tcp, nil
}
