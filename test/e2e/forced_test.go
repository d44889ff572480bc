package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/netpolicy"
	"github.com/sluice-proxy/sluice/test/wait"
)

// forcedWay is how a client gets to the relay, past kernel flows.
type forcedWay struct {
	name       string
	network    string
	annotation string // of the Service
	option     func(fd int) error
	size       int // of the client's datagram
	prepare    func(f *forced, to netip.AddrPort)
}

// In IPv4, 40 bytes of options make a SYN too long for the client's link of 68 bytes.
func fragmentSegments(fd int) error {
	if err := syscall.SetsockoptString(fd, syscall.IPPROTO_IP, syscall.IP_OPTIONS, strings.Repeat("\x01", 40)); err != nil {
		return err
	}
	return syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, syscall.IP_MTU_DISCOVER, syscall.IP_PMTUDISC_DONT)
}

var forcedWays = []forcedWay{
	{name: "a fragmented SYN", network: "tcp", option: fragmentSegments},
	{name: "the annotation of the data path", network: "tcp", annotation: "sluice.dev/datapath: relay"},
	{name: "the annotation of the data path", network: "udp", annotation: "sluice.dev/datapath: relay"},
	{name: "the annotation of responses", network: "udp", annotation: `sluice.dev/udp-responses: "5"`},
	{name: "a fragmented datagram", network: "udp", size: 3000},
	{name: "behind SYNs of its own", network: "tcp", prepare: (*forced).flood},
	{name: "behind sessions of its own", network: "udp", prepare: (*forced).fill},
}

// forced is a client that may not reach the endpoint of Services, and tries to.
type forced struct {
	t       *testing.T
	client  *netns.Host
	held    []net.Conn // its sessions
	decoys  []netip.AddrPort
	flooded uint16
}

// Flows of the proxy, and how many sessions take all of them.
const forcedFlows, forcedSessions = 256, 300

// flood sends more SYNs than a service port may have incomplete handshakes.
func (f *forced) flood(to netip.AddrPort) {
	must.OK(f.t, f.client.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		for range forcedFlows {
			f.flooded++
			from := netip.AddrPortFrom(f.client.IPv4, 10000+f.flooded)
			if errno := sys.SendRaw(fd, to.Addr(), (&segment{from: from, to: to, sequence: 1, flags: flagSYN}).packet()); errno != 0 {
				return errno
			}
		}
		return nil
	}))
}

// fill begins sessions with other Services until the table of flows is full.
func (f *forced) fill(netip.AddrPort) {
	for i := range forcedSessions {
		c := must.Get(f.client.Dial("udp", f.decoys[i%len(f.decoys)].String()))(f.t)
		f.held = append(f.held, c)
		_, _ = c.Write([]byte("x")) // an earlier one may have been refused
	}
}

// reaches reports whether the client reaches an endpoint.
func (f *forced) reaches(w *forcedWay, to netip.AddrPort, patience time.Duration) bool {
	if w.prepare != nil {
		w.prepare(f, to)
	}
	d := &net.Dialer{Timeout: patience}
	if w.option != nil {
		d.Control = func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = w.option(int(fd)) })
			return err
		}
	}
	c, err := f.client.Dialer(d, w.network, to.String())
	if err != nil {
		return false
	}
	defer c.Close()
	deadline := time.Now().Add(patience)
	question := []byte(strings.Repeat("x", max(w.size, 6)-1) + "\n")
	for time.Now().Before(deadline) { // a datagram may be lost
		if _, err := c.Write(question); err != nil && w.network == "tcp" {
			return false
		}
		_ = c.SetReadDeadline(time.Now().Add(silence / 2))
		if n, err := c.Read(make([]byte, 4096)); n > 0 {
			return true
		} else if w.network == "tcp" && err != nil && trouble(err) != "silent" {
			return false
		}
	}
	return false
}

// TestClientsForceNothingPastRules tries all ways to the relay that docs/datapath.md names. Without
// rules for forwarded packets the client is served. Where a network policy denies it the endpoint,
// it gets what docs/network-policy.md says, and Sluice logs the refusal.
func TestClientsForceNothingPastRules(t *testing.T) {
	t.Parallel()
	c := netns.NewCluster(t)
	endpoints := c.Pods[0]
	endpoints.WitnessTCP(t, 8080)
	endpoints.WitnessUDP(t, 8080)
	p := newClusterProxy(t, c)
	f := &forced{t: t, client: c.Pods[1]}
	t.Cleanup(func() {
		for _, c := range f.held {
			c.Close()
		}
	})
	to := make([]netip.AddrPort, len(forcedWays))
	serve := func(i int, w *forcedWay, e endpoint) netip.AddrPort {
		vip := fmt.Sprintf("10.96.0.%d", 10+i)
		o := &object{
			name: fmt.Sprintf("way-%d", i), kind: corev1.ServiceTypeClusterIP, vips: []string{vip}, port: 80, target: 8080,
			protocol: corev1.Protocol(strings.ToUpper(w.network)), endpoints: []endpoint{e},
		}
		text := o.yaml()
		if w.annotation != "" {
			text = strings.Replace(text, "metadata:\n", "metadata:\n  annotations:\n    "+w.annotation+"\n", 1)
			if !strings.Contains(text, w.annotation) {
				t.Fatal("no place for the annotation")
			}
		}
		p.write(o.name+".yaml", text)
		return netip.MustParseAddrPort(vip + ":80")
	}
	for i := range forcedWays {
		to[i] = serve(i, &forcedWays[i], endpoint{host: endpoints, node: "node"})
	}
	for i := range 3 {
		f.decoys = append(f.decoys, serve(100+i, &forcedWay{network: "udp"}, endpoint{host: c.Remote[0], node: "node2"}))
	}
	// No connection of the flood may complete or be reset.
	f.client.NFT(t, "table ip quiet {\nchain out {\ntype filter hook output priority 0\ntcp sport 10000-20000 tcp flags rst drop\n}\n}\n")
	link := f.client.Command(t, "ip", "route", "change", "default", "via", netns.NodePods[0].Addr().Next().String(), "mtu", "lock", "68")
	must.Run(t, link)
	p.start(decisionFlags("--datapath", "kernel", "--max-flows", fmt.Sprint(forcedFlows), "--access-log-udp", "all")...)
	for i := range forcedWays {
		if w := &forcedWays[i]; !f.reaches(w, to[i], wait.Patience) {
			t.Errorf("without rules, a client is not served by %s over %s", w.name, w.network)
		}
	}
	documented := netpolicy.Documented(t)
	deny := netpolicy.Cases[0]
	for i, style := range netpolicy.Styles {
		unload := style.Load(t, c.Node, deny)
		p.awaitLogs("rules judge what the kernel forwards, so", i+1)
		got := "holds"
		for i := range forcedWays {
			if w := &forcedWays[i]; f.reaches(w, to[i], silence) {
				got = "fails"
				t.Logf("%s: a client is served by %s over %s", style.Name, w.name, w.network)
			}
		}
		check.Equalf(t, got, documented[style.Name+", "+deny.Name]["what a client can force"], "%s, as docs/network-policy.md says", style.Name)
		// The node's own clients are judged by no such rules.
		check.OKf(t, must.Err(c.Node.Ask("tcp", to[0].String())), "%s: a client on the node", style.Name)
		unload()
		p.awaitLogs("no rules judge what the kernel forwards any more", i+1)
	}
	p.awaitLog("a client is refused that the kernel did not forward")
	m := must.Get(p.metrics())(t)
	if m["sluice_flows_refused_total"] == 0 {
		t.Error("no refused client is counted")
	}
	if w := &forcedWays[0]; !f.reaches(w, to[0], wait.Patience) {
		t.Errorf("without the rules again, a client is not served by %s over %s", w.name, w.network)
	}
}

// awaitLogs waits until the proxy has logged something a number of times.
func (p *proxy) awaitLogs(what string, times int) {
	p.t.Helper()
	wait.Until(p.t, fmt.Sprintf("the log says %q %d times", what, times), startTimeout, func() bool { return strings.Count(p.stderr.String(), what) >= times })
}
