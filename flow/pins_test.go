package flow

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Flows of a process that ended go on, and the next one adopts them.
func TestFlowsAreAdopted(t *testing.T) {
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))
	first.apply(services)
	tcp, err := lab.Client.Dial("tcp", vip4+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	if _, err := netns.AskOn(tcp); err != nil {
		t.Fatal(err)
	}
	udp, err := lab.Client.Dial("udp", vip4+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	said, err := question(udp)
	if err != nil {
		t.Fatal(err)
	}
	first.leave()

	echo := func() error {
		if _, err := io.WriteString(tcp, "ping"); err != nil {
			return err
		}
		b := make([]byte, 4)
		if _, err := io.ReadFull(tcp, b); err != nil || string(b) != "ping" {
			return fmt.Errorf("%q, %v", b, err)
		}
		if again, err := question(udp); err != nil || again != said {
			return fmt.Errorf("%q after %q, %v", again, said, err)
		}
		return nil
	}
	for range 10 { // while nobody runs
		if err := echo(); err != nil {
			t.Fatal(err)
		}
	}
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	if got := next.server.Stats().Open; got != 2 {
		t.Errorf("%d flows were adopted", got)
	}
	if err := echo(); err != nil {
		t.Fatal(err)
	}
	if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b") {
		t.Fatalf("%q, %v", said, err)
	}
	_ = tcp.Close()
	wait.For(t, "records", patience, func() error {
		for _, r := range next.taken() {
			if r.Client.String() != tcp.LocalAddr().String() {
				continue
			}
			if r.End != conntrack.ClientFin || r.BytesFromClient != 12+11*4 || r.ConnectTime <= 0 || r.Attempts != 1 || r.Port == nil || r.Endpoint == nil {
				t.Errorf("%+v", r)
			}
			return nil
		}
		return fmt.Errorf("%d records, none of the adopted connection", len(next.taken()))
	})
	if got := len(first.taken()); got != 0 {
		t.Errorf("%d records of flows that went on", got)
	}
	next.stop()
	if names := pinNames(next.server.pins.dir); len(names) > 0 {
		t.Errorf("pins after the stop: %v", names)
	}
}

// A process may be killed while it moves a UDP session to another endpoint. The next one ends
// the session: the client's next datagram begins another.
func TestSessionBetweenEndpointsIsAdopted(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessUDP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	first.apply(services)
	udp, err := lab.Client.Dial("udp", vip4+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	if _, err := question(udp); err != nil {
		t.Fatal(err)
	}
	wait.True(t, "the session is known", func() bool { return first.server.Stats().Open == 1 })
	first.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	for i := range next.server.kernel.flows { // it follows none before it has Services
		if k := &next.server.kernel.flows[i]; k.State == kernelStateOPEN {
			k.State = kernelStateMOVING
		}
	}
	next.apply(services)
	if _, err := question(udp); err != nil {
		t.Fatal(err)
	}
	next.stop()
	if r := next.taken(); len(r) != 2 || r[0].End != conntrack.EndpointGone || r[1].End != conntrack.Shutdown {
		t.Errorf("%+v", r)
	}
}

// The number of a network namespace's inode, which its pins have in their path, may be that of
// a later namespace. What was forwarded in the earlier one is not adopted.
func TestPinsOfAnEarlierNamespaceAreNotAdopted(t *testing.T) {
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	var labs [2]*netns.Lab
	var dirs [2]bpffs.Dir
	for i := range labs {
		labs[i] = netns.NewLab(t, 1)
		labs[i].Backends[0].EchoTCP(t, 8080)
		var err error
		if dirs[i], err = bpffs.Of(root, "test", labs[i].Node.FD()); err != nil {
			t.Fatal(err)
		}
	}
	first := newNode(t, labs[0], pinned)
	services := svc(vip4, nil, at(labs[0].Backends[0].IPv4, 8080))
	first.apply(services)
	if _, err := labs[0].Client.Ask("tcp", vip4+":80"); err != nil {
		t.Fatal(err)
	}
	first.leave()
	if err := os.Rename(string(dirs[0]), string(dirs[1])); err != nil {
		t.Fatal(err)
	}
	next := newNode(t, labs[1], func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	if got := next.server.Stats().Open; got != 0 {
		t.Errorf("%d flows of another namespace were adopted", got)
	}
	if said, err := labs[1].Client.Ask("tcp", vip4+":80"); err != nil || said != "b1:8080" {
		t.Errorf("%q, %v", said, err)
	}
}

func TestLayoutVersionIgnoresComments(t *testing.T) {
	a, b := layoutVersion("struct a { // one\n\tint b;\n};\n"), layoutVersion("struct a {\n int b; // other\n};\n")
	if a != b {
		t.Errorf("%s and %s", a, b)
	}
	if c := layoutVersion("struct a {\n long b;\n};\n"); c == a {
		t.Error("another layout has the same version")
	}
}
