package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The default of --max-flows goes by CPUs, as kube-proxy's rule for connection tracking does, and
// takes no more than 1/16 of the memory.
func TestMostFlows(t *testing.T) {
	for _, c := range []struct {
		wanted int
		memory uint64
		want   int
	}{
		{131072, 0, 131072},
		{131072, 1 << 30, 131072},
		{131072, 512 << 20, 97541},
		{1 << 20, 1 << 30, 195083},
		{1 << 20, 64 << 30, 1<<20 - 1},
		{131072, 1, 1},
	} {
		check.Equalf(t, mostFlows(c.wanted, c.memory), c.want, "%d flows in %d bytes", c.wanted, c.memory)
	}
}

// settled waits until it is clear which data path serves, and returns why it is the relay.
func settled(t *testing.T, p *Proxy, path conntrack.Path) (why string) {
	t.Helper()
	wait.For(t, "the data path is "+path.String(), time.Minute, func() error {
		s, err := p.status(t.Context())
		if err == nil && s.DataPath != path.String() {
			err = fmt.Errorf("it is %s (%s)", s.DataPath, s.DataPathWhy)
		}
		if err == nil {
			why = s.DataPathWhy
		}
		return err
	})
	return why
}

// TestRelayServesWhileFlowsStart: while the kernel verifies the programs of kernel flows, the
// relay serves, and its UDP sessions stay its own. Then kernel flows serve.
func TestRelayServesWhileFlowsStart(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	verified := make(chan struct{})
	verify := sync.OnceFunc(func() { close(verified) })
	c := config(t, webManifest+"---\n"+strings.NewReplacer("{port: 80}", "{port: 80, protocol: UDP}", "{port: 8080}", "{port: 8080, protocol: UDP}", "web", "udp", "10.96.0.10", "10.96.0.11").Replace(webManifest))
	c.DataPath, c.beforeFlows = AutoPath, func() error {
		<-verified
		return nil
	}
	p := must.Get(New(c, zerolog.New(zerolog.NewTestWriter(t))))(t)
	_, stop := run(t, p)
	defer stop()
	defer verify() // before the stop, which waits for it
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	check.Containsf(t, settled(t, p, conntrack.Relayed), "being loaded", "the status says that all is relayed as")
	u := must.Get(net.Dial("udp", "10.96.0.11:80"))(t)
	defer u.Close()
	ask := func() error {
		b := make([]byte, 100)
		_ = u.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := u.Write([]byte("who\n")); err != nil {
			return err
		}
		_, err := u.Read(b)
		return err
	}
	wait.For(t, "an answer by UDP", 30*time.Second, ask)
	var sessions []string
	p.relayedSessions(func(client, vip netip.AddrPort) { sessions = append(sessions, client.String()+" "+vip.String()) })
	if want := u.LocalAddr().String() + " 10.96.0.11:80"; !slices.Equal(sessions, []string{want}) {
		t.Errorf("the relay has %q, want %q", sessions, want)
	}
	verify()
	check.Equalf(t, settled(t, p, conntrack.Kernel), "", "kernel flows serve because")
	check.OKf(t, errors.Join(askWeb(), ask()), "with kernel flows")
}

// TestFlowsThatDoNotStart: with --datapath auto, an error of the start of kernel flows is no
// error of the proxy. With --datapath kernel it is.
func TestFlowsThatDoNotStart(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	const trouble = "the verifier is out of order"
	c := config(t, webManifest)
	c.DataPath, c.beforeFlows = AutoPath, func() error { return errors.New(trouble) }
	p, err := New(c, zerolog.New(zerolog.NewTestWriter(t)))
	must.OK(t, err)
	_, stop := run(t, p)
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	wait.True(t, "the status says why", func() bool { return settled(t, p, conntrack.Relayed) == trouble })
	if problems, err := testutil.CollectAndLint(dataPathMetric{p}); err != nil || len(problems) > 0 {
		t.Errorf("the metric: %v, %v", problems, err)
	}
	if err := testutil.CollectAndCompare(dataPathMetric{p}, strings.NewReader("# HELP sluice_data_path "+dataPathHelp+"\n# TYPE sluice_data_path gauge\nsluice_data_path{path=\"relay\",reason=\""+trouble+"\"} 1\n"), "sluice_data_path"); err != nil {
		t.Error(err)
	}
	if err := testutil.CollectAndCompare(dataPathMetric{p}, strings.NewReader("# HELP sluice_node_clients_data_path "+nodeClientsHelp+"\n# TYPE sluice_node_clients_data_path gauge\nsluice_node_clients_data_path{path=\"relay\",reason=\""+trouble+"\"} 1\n"), "sluice_node_clients_data_path"); err != nil {
		t.Error(err)
	}
	stop()
	c.DataPath = KernelPath
	if p, err = New(c, zerolog.New(zerolog.NewTestWriter(t))); err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context(), nil); err == nil || err.Error() != "--datapath kernel: "+trouble {
		t.Errorf("Run with --datapath kernel: %v", err)
	}
}
