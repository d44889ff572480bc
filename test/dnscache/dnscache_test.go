package dnscache

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/proxy"
	"github.com/sluice-proxy/sluice/test/wait"
)

const (
	dnsIP      = "10.96.0.10" // kube-dns, which the cache takes
	upstreamIP = "10.96.0.11" // kube-dns-upstream, which the cache asks
	linkLocal  = "169.254.20.10"
	device     = "nodelocaldns"

	fromEndpoint = "192.0.2.1" // what the endpoint says of ask.test and who.test
	fromCache    = "192.0.2.2" // what the cache says of who.test
)

// patience bounds what a busy machine may take; for a start with kernel flows, the kernel's
// verifier too.
const patience = 5 * time.Minute

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// world is a node with Sluice, and kube-dns behind it.
type world struct {
	t       *testing.T
	lab     *netns.Lab
	cache   string // the program
	log     output.Text
	running *netns.Cmd // the cache; nil while there is none
}

// TestNodeLocalDNSCache starts the cache on a node that has DNS traffic, or before that, stops it
// and starts it again. The cache and its Service kube-dns-upstream answer while it is there, and
// endpoints while it is not.
func TestNodeLocalDNSCache(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "cache")
	must.Run(t, exec.Command("go", "build", "-buildvcs=false", "-o", cache, "./cache"))
	for _, datapath := range []string{"relay", "kernel"} {
		for _, order := range []string{"cache first", "cache later"} {
			t.Run(datapath+"/"+order, func(t *testing.T) {
				w := &world{t: t, lab: netns.NewLab(t, 1), cache: cache}
				w.serve(w.lab.Backends[0], ".:53 {\n hosts {\n  "+fromEndpoint+" ask.test who.test\n }\n}\n")
				if order == "cache first" {
					w.install()
				}
				w.start(datapath)
				if order == "cache later" {
					w.expect("before the cache", fromEndpoint)
					defer w.hold()() // its bind must not mind
					w.install()
				}
				w.expect("with the cache", fromCache)
				w.stop()
				w.expect("after the cache", fromEndpoint)
				w.install()
				w.expect("with the cache again", fromCache)
			})
		}
	}
}

// run starts a program, which ends with the test.
func (w *world) run(h *netns.Host, name string, args ...string) *netns.Cmd {
	w.t.Helper()
	c := h.Command(w.t, name, args...)
	c.Stdout, c.Stderr = &w.log, &w.log
	must.OK(w.t, c.Start())
	return c
}

// serve runs CoreDNS on a host.
func (w *world) serve(h *netns.Host, corefile string) *netns.Cmd {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "Corefile")
	must.OK(w.t, os.WriteFile(path, []byte(corefile), 0o600))
	return w.run(h, w.cache, "-conf", path)
}

// start runs Sluice until it is ready.
func (w *world) start(datapath string) {
	w.t.Helper()
	var text strings.Builder
	for name, ip := range map[string]string{"kube-dns": dnsIP, "kube-dns-upstream": upstreamIP} {
		fmt.Fprintf(&text, `apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: kube-system}
spec: {clusterIP: %[2]s, clusterIPs: [%[2]s], ipFamilies: [IPv4], ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, namespace: kube-system, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]
endpoints: [{addresses: ["%[3]s"], nodeName: elsewhere}]
---
`, name, ip, w.lab.Backends[0].IPv4)
	}
	p := proxy.New(w.t, w.lab.Node)
	p.Write(text.String())
	p.Start(nil, "--access-log", "off", "--bpf-root", "", "--datapath", datapath)
}

// install gives the node the cache's interface and rules, as NodeLocal DNSCache does, and
// starts it.
func (w *world) install() {
	w.t.Helper()
	var addrs []netip.Prefix
	for _, a := range []string{linkLocal, dnsIP} {
		addrs = append(addrs, netip.PrefixFrom(netip.MustParseAddr(a), 32))
	}
	netns.Wire(w.t, w.lab.Node.Namespace, device, addrs, netns.New(w.t, "nowhere"), "eth0", nil)
	w.rules("-A")
	bind := " bind " + linkLocal + " " + dnsIP + "\n"
	w.running = w.serve(w.lab.Node, "who.test:53 {\n"+bind+" hosts {\n  "+fromCache+" who.test\n }\n}\n"+
		"test:53 {\n errors\n cache 30\n"+bind+" forward . "+upstreamIP+" {\n  force_tcp\n }\n}\n")
}

// stop ends the cache, which takes its interface and rules with it.
func (w *world) stop() {
	w.t.Helper()
	must.OK(w.t, w.running.Process.Signal(syscall.SIGKILL))
	_ = w.running.Wait()
	w.rules("-D")
	link, err := w.lab.Node.Netlink().LinkByName(device)
	if err == nil {
		err = w.lab.Node.Netlink().LinkDel(link)
	}
	must.OK(w.t, err)
}

// rules adds or removes those that keep the cache's packets out of connection tracking.
func (w *world) rules(change string) {
	w.t.Helper()
	for _, protocol := range []string{"udp", "tcp"} {
		for _, match := range []string{"PREROUTING -d %s --dport", "OUTPUT -d %s --dport", "OUTPUT -s %s --sport"} {
			chain, rest, _ := strings.Cut(match, " ")
			args := append([]string{"-w", "-t", "raw", change, chain, "-p", protocol}, strings.Fields(fmt.Sprintf(rest, dnsIP))...)
			if out, err := w.lab.Node.Command(w.t, "iptables-nft", append(args, "53", "-j", "NOTRACK")...).CombinedOutput(); err != nil {
				w.t.Fatalf("%v: %v\n%s", args, err, out)
			}
		}
	}
}

// expect waits until the node and a client are answered by who has to answer, at both
// cluster IPs, over UDP and TCP.
func (w *world) expect(when, who string) {
	w.t.Helper()
	for _, from := range []*netns.Host{w.lab.Client, w.lab.Node} {
		for _, network := range []string{"udp", "tcp"} {
			for _, question := range [][3]string{{dnsIP, "who.test.", who}, {dnsIP, "ask.test.", fromEndpoint}, {upstreamIP, "who.test.", fromEndpoint}} {
				wait.For(w.t, fmt.Sprintf("%s: %s asks %s over %s for %s", when, from.Name(), question[0], network, question[1]), time.Minute, func() error {
					return ask(from, network, question)
				})
			}
		}
	}
}

// ask resolves a name at an address and wants an answer.
func ask(from *netns.Host, network string, question [3]string) error {
	r := net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		return from.Dial(network, net.JoinHostPort(question[0], "53"))
	}}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	got, err := r.LookupNetIP(ctx, "ip4", question[1])
	if err == nil && (len(got) != 1 || got[0].String() != question[2]) {
		err = fmt.Errorf("got %v, want %s", got, question[2])
	}
	return err
}

// hold keeps a connection to kube-dns open.
func (w *world) hold() (release func()) {
	w.t.Helper()
	c := must.Get(w.lab.Client.Dial("tcp", net.JoinHostPort(dnsIP, "53")))(w.t)
	return func() { _ = c.Close() }
}
