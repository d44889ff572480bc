package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The data path of a connection follows from its client and its Service. The node's own clients are
// relayed while a rule judges their packets, as the status says.
func TestDataPathOfConnections(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	relayed := webService{name: "relayed", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[0])[:1]}
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.write("relayed.yaml", strings.Replace(relayed.yaml(), "metadata:\n", "metadata:\n  annotations: {sluice.dev/datapath: relay}\n", 1))
	p.start("--datapath", "kernel")
	p.awaitLog("new connections of the node's own clients are the kernel's")
	had := 0
	asks := func(from *netns.Host, vip, path string) {
		t.Helper()
		must.OKf(t, must.Err(from.Ask("tcp", net.JoinHostPort(vip, "80"))), "from %s to %s", from.Name(), vip)
		check.Equalf(t, p.awaitRecords(had + 1)[had].Path, path, "from %s to %s: the path is", from.Name(), vip)
		had++
	}
	for _, c := range []struct {
		from *netns.Host
		vip  string
		path string
	}{
		{lab.Client, vip4, "kernel"},
		{lab.Client, vip6, "kernel"},
		{lab.Client, "10.96.0.11", "relay"}, // annotated
		{lab.Node, vip4, "kernel"},
		{lab.Node, vip6, "kernel"},
		{lab.Node, "10.96.0.11", "relay"},
		{lab.Backends[0], vip4, "kernel"}, // reaches itself too
		{lab.Backends[0], vip4, "kernel"},
		{lab.Backends[0], vip6, "kernel"},
		{lab.Backends[0], vip6, "kernel"},
	} {
		asks(c.from, c.vip, c.path)
	}
	status := func() string {
		return must.Get(sluice(t, lab, "status"))(t)
	}
	const told = "this node's own clients are relayed"
	if said := status(); strings.Contains(said, told) {
		t.Errorf("the status is:\n%s", said)
	}
	lab.Node.NFT(t, "add table inet other\nadd chain inet other c { type filter hook output priority 0; }\nadd rule inet other c tcp dport 9 drop")
	wait.True(t, "the node's own clients are relayed", func() bool {
		return strings.Contains(status(), told+": the chain c of nftables' table other")
	})
	asks(lab.Node, vip4, "relay")
	p.kill()
	says(t, lab, "removed interface sluice of kernel flows", "cleanup")
}

// TestStatusCountsFlows: sluice status and the metrics count what the kernel forwards, and name the
// limits of both data paths.
func TestStatusCountsFlows(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "kernel")
	const held = 3
	hold(t, lab.Client, addresses(80, vip4)[0], held)
	p.awaitMetrics("the flows", func(m map[string]float64) bool { return m["sluice_flows"] == held })
	m := must.Get(p.metrics())(t)
	said, err := sluice(t, lab, "status")
	want := []string{
		fmt.Sprintf("kernel, beside the relay: %d connections and sessions of at most %.0f\n", held, m["sluice_flows_limit"]),
		fmt.Sprintf("0 connections of at most %.0f, ", m["sluice_connections_limit"]),
	}
	for _, w := range want {
		if err != nil || !strings.Contains(said, w) || m["sluice_flows_limit"] == 0 || m["sluice_connections_limit"] == 0 {
			t.Errorf("%v; the status lacks %q:\n%s", err, w, said)
		}
	}
}

// TestInterfaceThatTakesNoProgram: where the programs cannot be put, --datapath auto relays, and the
// log, the status and the metric say why.
func TestInterfaceThatTakesNoProgram(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	must.OK(t, lab.Node.Do(func() error {
		index, err := net.InterfaceByName("b1")
		for full := false; err == nil && !full; {
			var program *ebpf.Program
			if program, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}}); err != nil {
				return err
			}
			t.Cleanup(func() { _ = program.Close() })
			var l link.Link
			if l, err = link.AttachTCX(link.TCXOptions{Program: program, Interface: index.Index, Attach: ebpf.AttachTCXIngress}); errors.Is(err, unix.ERANGE) {
				full, err = true, nil // BPF_MPROG_MAX
			} else if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
		}
		return err
	}))
	p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", "auto")
	check.OK(t, must.Err(lab.Client.Ask("tcp", vip4+":80")))
	check.Equalf(t, p.awaitRecords(1)[0].Path, "relay", "the path is")
	const why = "attach to b1"
	p.awaitLog(why)
	status, err := sluice(t, lab, "status")
	if err != nil || !regexp.MustCompile(`data path +relay \(.*`+why).MatchString(status) {
		t.Errorf("%v, the status is:\n%s", err, status)
	}
	if report, _ := sluice(t, lab, "doctor", "-o", "json"); !regexp.MustCompile(`"kernel flows",[^}]*` + why).MatchString(report) {
		t.Errorf("the doctor says:\n%s", report)
	}
	all, err := p.metrics()
	if err != nil || !slices.ContainsFunc(slices.Collect(maps.Keys(all)), func(series string) bool {
		return strings.HasPrefix(series, `sluice_data_path{path="relay",reason="`+why)
	}) {
		t.Errorf("%v, no metric says why", err)
	}
	if err := lab.Node.Do(func() error {
		return hasNoPrograms("client")
	}); err != nil {
		t.Error(err)
	}
}

// hasNoPrograms returns an error if interfaces of this namespace have BPF programs.
func hasNoPrograms(interfaces ...string) error {
	for _, name := range interfaces {
		at, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		for _, side := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			if found, err := link.QueryPrograms(link.QueryOptions{Target: at.Index, Attach: side}); err != nil || len(found.Programs) > 0 {
				return fmt.Errorf("%s: %w, programs are left: %v", name, err, found)
			}
		}
	}
	return nil
}

// forwarded reports whether the suite runs with connections that the kernel forwards.
func forwarded() bool {
	return strings.Contains(os.Getenv("SLUICE_TEST_FLAGS"), "--datapath=kernel")
}

// checkPaths expects the data path that the suite runs with in each record: none of its
// tests passes on the other one.
func (p *proxy) checkPaths() {
	records, err := readRecords(p.accessLog)
	if err != nil || p.relayed != "" {
		return // its test judges what is in the log
	}
	own := p.node.Addrs(p.t)
	wrong, early := 0, 0
	for _, r := range records {
		want := "relay"
		if a := r.Client.Addr(); forwarded() && !a.IsLoopback() && !slices.Contains(own, a) {
			want = "kernel"
		} else if forwarded() && slices.Contains(own, a) {
			want = r.Path // TestNodesOwnClientsAreForwarded says which
		}
		// While it stops, the relay serves those who still send, without kernel flows.
		if r.Path != want && forwarded() && r.VIPKind == "NodePort" {
			// The relay may have the first connections of a new node port: it binds the port
			// before the kernel forwards.
			if early++; early <= max(3, len(records)/100) {
				continue
			}
		}
		// If a change leaves a Service no endpoint, the kernel hands its clients to the relay, which
		// may still ask the endpoint that is gone.
		if r.Path == "relay" && forwarded() && r.Protocol == "UDP" && r.End == "connect_failed" {
			continue
		}
		if r.Path != want && !p.endedAt(r.Time) {
			if wrong++; wrong <= 3 {
				p.t.Errorf("the data path of this connection is not %s: %+v", want, r)
			}
		}
	}
	if wrong > 3 {
		p.t.Errorf("%d of %d connections had the wrong data path", wrong, len(records))
	}
}

// endedAt reports whether the proxy was ending, not running, or beginning at a time.
func (p *proxy) endedAt(at time.Time) bool {
	return slices.ContainsFunc(p.ends, func(e [2]time.Time) bool { return !at.Before(e[0]) && (e[1].IsZero() || at.Before(e[1])) })
}
