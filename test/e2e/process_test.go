package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise5_OneRecordForEachConnectionAlsoWhenStopped stops the proxy while
// connections are open. Some have an endpoint, some wait for one.
func TestPromise5_OneRecordForEachConnectionAlsoWhenStopped(t *testing.T) {
	t.Parallel()
	const over, live, dialling = 5, 10, 3
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080)
	swallow(t, lab.Backends[1], 8080)
	web := webOn(lab)
	web.endpoints = on(8080, lab.Backends[0])
	hole := webService{name: "hole", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[1])[:1]}
	p := startProxy(t, lab, []webService{web, hole})

	for range over {
		must.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	}
	p.awaitRecords(over)
	held := hold(t, lab.Client, addresses(80, vip6)[0], live)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for range dialling {
		if forwarded() { // the client waits for the endpoint itself
			waiting.Go(func() {
				if c, err := lab.Client.Dial("tcp", addresses(80, hole.vips...)[0]); err == nil {
					_ = c.Close()
				}
			})
			continue
		}
		lab.Client.Connect(t, "tcp", addresses(80, hole.vips...)[0])
	}
	p.awaitOpen(live + dialling) // the latter wait for an endpoint
	p.stop()
	for _, c := range held {
		if err := ended(c); !isReset(err) {
			t.Errorf("a connection that was cut by the stop ended with %v, want a reset: a FIN would make a truncated stream look complete", err)
		}
	}
	records := p.records()
	ends := map[string]int{}
	for _, r := range records {
		ends[r.End]++
	}
	if len(records) != over+live+dialling || ends["client_fin"] != over || ends["shutdown"] != live+dialling {
		t.Errorf("the records end with %v, want %d client_fin and %d shutdown", ends, over, live+dialling)
	}
	index(t, records)
}

// TestRecordHasAllFields compares a record with the connection.
func TestRecordHasAllFields(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	before := time.Now()
	v := ask(lab.Client, addresses(80, vip4)[0])
	if v.err != nil {
		t.Fatal(v.err)
	}
	r := p.awaitRecords(1)[0]
	most := time.Since(before)
	if r.Time.Before(before.Add(-time.Millisecond)) || r.Time.After(time.Now()) {
		t.Errorf("time is %v, it was %v", r.Time, before)
	}
	got := fmt.Sprintln(r.Protocol, r.Client, r.VIP, r.VIPKind, r.Service, r.Endpoint, r.Pod, r.Node, r.Zone, r.Affinity, r.Attempts, len(r.Failed), r.BytesUp, r.BytesDown, r.End)
	want := fmt.Sprintln("TCP", v.client, vip4+":80", "ClusterIP", "default/web:http", netip.AddrPortFrom(lab.Backends[0].IPv4, 8080),
		"default/web-1", "backend", "zone-a", "none", 1, 0, uint64(len("knock knock\n")), uint64(len("b1:8080\nknock knock\n")), "client_fin")
	check.Textf(t, got, want, "the line")
	if r.ConnectUS == nil || r.FirstByteUS == nil || *r.ConnectUS <= 0 || *r.FirstByteUS < *r.ConnectUS || r.DurationUS < *r.FirstByteUS {
		t.Errorf("times do not follow each other: connect %v, first byte %v, duration %v", r.ConnectUS, r.FirstByteUS, r.DurationUS)
	}
	if r.DurationUS > most.Microseconds() {
		t.Errorf("it lasted %d us, and the client knew of its record after %d", r.DurationUS, most.Microseconds())
	}
}

// TestRecordNamesTheNodeAsClient connects from the node, and from a client behind it. The record of
// the node's own process names the node, whichever of its addresses the kernel has chosen.
func TestRecordNamesTheNodeAsClient(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", path)
		for _, h := range []*netns.Host{lab.Node, lab.Client} {
			for _, to := range addresses(80, vip4, vip6) {
				if v := ask(h, to); v.err != nil {
					t.Fatal(v.err)
				}
			}
		}
		for _, r := range p.awaitRecords(4) {
			want := "node"
			if a := r.Client.Addr(); a == lab.Client.IPv4 || a == lab.Client.IPv6 {
				want = ""
			}
			check.Equalf(t, r.ClientNode, want, "client %s: client_node", r.Client)
		}
	})
}

// TestHangupReopensTheLog rotates the access log while clients connect. No record
// may be lost or written twice.
func TestHangupReopensTheLog(t *testing.T) {
	t.Parallel()
	const each = 50
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	visits := func() {
		for _, v := range crowd(each, 4, func(int) visit { return ask(lab.Client, addresses(80, vip4)[0]) }) {
			if v.err != nil {
				t.Error(v.err)
			}
		}
	}
	visits()
	p.awaitRecords(each)
	rotated := p.accessLog + ".1"
	must.OK(t, os.Rename(p.accessLog, rotated))
	p.signal(syscall.SIGHUP)
	visits() // some are written before the log is reopened, some after
	more := 0
	wait.For(t, "the log is there again, and used", stopTimeout, func() error {
		if info, err := os.Stat(p.accessLog); err != nil || info.Size() > 0 {
			return err
		}
		more++
		if v := ask(lab.Client, addresses(80, vip4)[0]); v.err != nil {
			t.Error(v.err)
		}
		return errNotYet
	})
	visits()
	p.stop()
	old := must.Get(readRecords(rotated))(t)
	all := append(old, p.records()...)
	if len(all) != 3*each+more || len(old) < each || len(old) > 2*each+more {
		t.Errorf("%d records in the old file, %d in all, want %d", len(old), len(all), 3*each+more)
	}
	index(t, all)
}

// TestNeedsNoMoreThanNetAdmin runs the proxy as an unprivileged user with only
// that capability.
func TestNeedsNoMoreThanNetAdmin(t *testing.T) {
	t.Parallel()
	const nobody = 65534
	if strings.Contains(os.Getenv("SLUICE_TEST_FLAGS"), "sklookup") {
		t.Skip("SKIP-NEEDS: a steering mode without BPF, which needs another capability")
	}
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	for _, dir := range []string{filepath.Dir(built(t)), filepath.Dir(filepath.Dir(p.manifests)), filepath.Dir(p.manifests)} {
		must.OK(t, os.Chmod(dir, 0o755))
	}
	if err := os.Chown(filepath.Dir(p.accessLog), nobody, nobody); err != nil {
		if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIP-NEEDS: more than one user: %v", err) // a user namespace of one's own has one
	}
	p.credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	p.start()
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, address := range addresses(80, vip4, vip6) {
			check.OKf(t, must.Err(from.Ask("tcp", address)), "%s to %s", from.Name(), address)
		}
	}
	p.stop()
}

// TestDemo runs the demo as `make demo` does, from a separate namespace, and
// expects it to change nothing.
func TestDemo(t *testing.T) {
	lab := netns.NewLab(t, 0)
	before := settledState(t, lab)
	cmd := lab.Node.Command(t, built(t), "demo", "--once")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := regexp.MustCompile(`^demo: (\d+) connections, (\d+) answered, (\d+) retried, 0 failed$`)
	if m := last.FindStringSubmatch(lines[len(lines)-1]); m == nil || m[1] == "0" || m[2] == "0" || m[3] == "0" {
		t.Errorf("the last line is %q", lines[len(lines)-1])
	}
	check.Textf(t, changes(before, kernelState(t, lab)), "", "left")
}

// TestWrongFlagsNameTheRightOnes also expects that nothing was started.
func TestWrongFlagsNameTheRightOnes(t *testing.T) {
	for _, row := range []struct{ args, want string }{
		{"run --manifest x", "--manifests"},
		{"run --manifests /nowhere/at/all", "/nowhere/at/all"},
		{"run --manifests . --redirect magic", "tproxy"},
		{"run --manifests . --access-log-format xml", "json"},
		{"run --manifests . --service-cidr 10.96.0.0", "10.96.0.0"},
		{"run --manifests . --max-connections-per-service -1", "-1"},
		{"run", "--manifests"},
		{"rum", "run"},
	} {
		lab := netns.NewLab(t, 0)
		cmd := exec.Command(built(t), strings.Fields(row.args)...)
		err := lab.Node.Do(func() error {
			out, err := cmd.CombinedOutput()
			if !strings.Contains(string(out), row.want) || strings.Count(string(out), "\n") > 6 {
				t.Errorf("sluice %s said %q, want few lines with %q", row.args, out, row.want)
			}
			return err
		})
		if err == nil {
			t.Errorf("sluice %s ended with exit status 0", row.args)
		}
	}
}
