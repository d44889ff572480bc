package dns

import (
	"debug/elf"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/live/explain"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

const (
	zoneKey = "topology.kubernetes.io/zone"
	hostKey = "kubernetes.io/hostname"
)

// cluster returns three nodes, n-a, n-b and n-c, in zones a, b and c, whose pods have
// 10.244.1.0/24, 10.244.2.0/24 and 10.244.3.0/24.
func cluster() (c service.Change) {
	for i, zone := range []string{"a", "b", "c"} {
		c.Nodes = append(c.Nodes, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n-" + zone, Labels: map[string]string{zoneKey: zone, hostKey: "n-" + zone}},
			Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.244." + string(rune('1'+i)) + ".0/24"}},
			Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2." + string(rune('1'+i))}}},
		})
	}
	return c
}

// clusterIPZones returns the zones of the endpoints that a Service with a cluster IP, and else
// like a headless one, has for a client on the node of a zone.
func clusterIPZones(headless *corev1.Service, slice *discoveryv1.EndpointSlice, zone string, client netip.Addr) string {
	svc := headless.DeepCopy()
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "10.96.0.7", []string{"10.96.0.7"}
	svc.Spec.Type, svc.Spec.Ports = corev1.ServiceTypeClusterIP, []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}
	slice = slice.DeepCopy()
	slice.Ports = []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(80)), Protocol: new(corev1.ProtocolTCP)}}
	change := cluster()
	change.Services, change.EndpointSlices = []*corev1.Service{svc}, []*discoveryv1.EndpointSlice{slice}
	options := service.StoreOptions{NodeName: "n-" + zone}
	table := policy.Compile(nil, service.NewStore(options).Apply(change), policy.Config{NodeName: options.NodeName})
	a := explain.Ask(table, explain.Question{Protocol: service.TCP, From: client, To: netip.MustParseAddrPort("10.96.0.7:80")}, false, nil, nil)
	var zones []string
	for _, candidate := range a.Candidates {
		zones = append(zones, string(rune('a'+netip.MustParseAddrPort(candidate).Addr().As4()[2]-1)))
	}
	slices.Sort(zones)
	return strings.Join(zones, "")
}

// TestTopology asks for a headless Service from the pods of three zones, by the cases of
// topology keys (hard, soft, several, none left) and of hints. The same Service with a
// cluster IP has the same endpoints.
func TestTopology(t *testing.T) {
	clients := map[string]netip.Addr{"a": netip.MustParseAddr("10.244.1.9"), "b": netip.MustParseAddr("10.244.2.9"), "c": netip.MustParseAddr("192.0.2.3")}
	for _, row := range []struct {
		name  string
		keys  string
		ready string // zones with a ready endpoint; each has one, of its letter
		hints bool
		want  [3]string // zones of the endpoints that clients in a, b and c are told; "" for none
	}{
		{"no keys", "", "abc", false, [3]string{"abc", "abc", "abc"}},
		{"hard", zoneKey, "abc", false, [3]string{"a", "b", "c"}},
		{"hard, one left", zoneKey, "b", false, [3]string{"", "b", ""}},
		{"soft", zoneKey + ",*", "abc", false, [3]string{"a", "b", "c"}},
		{"soft, one left", zoneKey + ", *", "b", false, [3]string{"b", "b", "b"}},
		{"several", hostKey + "," + zoneKey + ",*", "bc", false, [3]string{"bc", "b", "c"}},
		{"a key that no node has", "example.com/rack", "abc", false, [3]string{"", "", ""}},
		{"none left", zoneKey + ",*", "", false, [3]string{"", "", ""}},
		{"hints", "", "abc", true, [3]string{"a", "b", "c"}},
		{"hints, one left", "", "b", true, [3]string{"b", "b", "b"}},
		{"keys go before hints", "*", "abc", true, [3]string{"abc", "abc", "abc"}},
	} {
		catalog, store := NewCatalog(), service.NewStore(service.StoreOptions{NodeName: "n-a"})
		nodes := store.Apply(cluster()).Nodes
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "shop"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone}}
		if row.keys != "" {
			svc.Annotations = map[string]string{"sluice.dev/topology-keys": row.keys}
		}
		slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "db"}}, AddressType: discoveryv1.AddressTypeIPv4}
		for i, zone := range []string{"a", "b", "c"} {
			e := discoveryv1.Endpoint{
				Addresses: []string{"10.244." + string(rune('1'+i)) + ".1"}, NodeName: new("n-" + zone), Zone: new(zone),
				Conditions: discoveryv1.EndpointConditions{Ready: new(strings.Contains(row.ready, zone))},
			}
			if row.hints {
				e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
			}
			slice.Endpoints = append(slice.Endpoints, e)
		}
		names := catalog.Apply(service.Change{Services: []*corev1.Service{svc}, EndpointSlices: []*discoveryv1.EndpointSlice{slice}})
		v := &view{names: names, zone: "cluster.local.", places: newPlaces(nodes, *nodes.Get("n-a"))}
		for i, zone := range []string{"a", "b", "c"} {
			check.Equalf(t, clusterIPZones(svc, slice, zone, clients[zone]), row.want[i], "%s: with a cluster IP, a client in %s", row.name, zone)
			q := dnsmessage.Question{Name: dnsmessage.MustNewName("db.shop.svc.cluster.local."), Type: tA, Class: dnsmessage.ClassINET}
			for turn := range uint32(7) {
				v.turn = turn
				a := v.answer(q, clients[zone])
				var got []string
				for _, r := range a.records {
					got = append(got, string(rune('a'+r.data[2]-1)))
				}
				slices.Sort(got)
				if zones := strings.Join(got, ""); zones != row.want[i] || (a.code == dnsmessage.RCodeNameError) != (zones == "") {
					t.Errorf("%s: a client in %s gets %q, %s; want %q", row.name, zone, zones, a.code, row.want[i])
				}
			}
		}
	}
}

// TestPlaces finds nodes by addresses and pod ranges, the longest first.
func TestPlaces(t *testing.T) {
	c := cluster()
	c.Nodes = append(c.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n-d"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.0.0/16", "fd00::/64"}}})
	nodes := service.NewStore(service.StoreOptions{}).Apply(c).Nodes
	p := newPlaces(nodes, service.Node{Name: "own"})
	for client, want := range map[string]string{"10.244.2.200": "n-b", "10.244.9.1": "n-d", "192.0.2.1": "n-a", "fd00::7": "n-d", "198.51.100.1": "own", "::1": "own"} {
		check.Equalf(t, p.of(netip.MustParseAddr(client)).Node, want, "%s is on", client)
	}
	check.Equalf(t, newPlaces(nil, service.Node{Name: "own"}).of(netip.MustParseAddr("192.0.2.1")).Node, "own", "without nodes")
}

// FuzzMessage: no message makes the Server fail, and each answer is one to its question.
func FuzzMessage(f *testing.F) {
	l := &lab{Server: &Server{zone: "cluster.local.", options: Options{}}, catalog: NewCatalog()}
	l.apply(read(f, "shop.yaml"))
	for _, name := range []string{"web.shop.svc.cluster.local.", "_sql._tcp.db.shop.svc.cluster.local.", "10.0.96.10.in-addr.arpa.", "loop.shop.svc.cluster.local."} {
		f.Add(withOPT(f, name, 1232, 0), true)
		f.Add(withOPT(f, name, 100, 1), false)
	}
	f.Add([]byte{0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1}, true)
	f.Fuzz(func(t *testing.T, message []byte, udp bool) {
		network, most := "tcp", tcpSize
		if udp {
			network, most = "udp", mostSize
		}
		reply, later := l.handle(message, netip.MustParseAddr("10.244.1.1"), network)
		if later != nil {
			t.Fatal("a resolver is to be asked, and there is none")
		}
		if reply == nil {
			return
		}
		var p dnsmessage.Parser
		h, err := p.Start(reply)
		if err != nil || !h.Response || len(reply) > most || h.ID != uint16(message[0])<<8|uint16(message[1]) {
			t.Fatalf("%d bytes, %+v, %v", len(reply), h, err)
		}
		var m dnsmessage.Message
		must.OKf(t, m.Unpack(reply), "%x", reply)
	})
}

// BenchmarkAnswer answers for one of 10,000 Services, without the network.
func BenchmarkAnswer(b *testing.B) {
	l := &lab{Server: &Server{zone: "cluster.local."}, catalog: NewCatalog()}
	var c service.Change
	for i := range 10_000 {
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
		c.Services = append(c.Services, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web-" + a, Namespace: "shop"}, Spec: corev1.ServiceSpec{ClusterIP: a}})
	}
	for _, svc := range c.Services {
		svc.Name = strings.ReplaceAll(svc.Name, ".", "-")
	}
	l.apply(c)
	message := withOPT(b, "web-10-96-7-7.shop.svc.cluster.local.", 1232, 0)
	b.ReportAllocs()
	for b.Loop() {
		if reply, _ := l.handle(message, netip.MustParseAddr("10.244.1.1"), "udp"); len(reply) < 40 {
			b.Fatal("no answer")
		}
	}
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkBinary reports what the server adds to the binary: it builds sluice with it and
// without.
func BenchmarkBinary(b *testing.B) {
	files := must.Get(filepath.Glob("*.go"))(b)
	replace := make(map[string]string)
	for _, f := range files {
		replace[abs(b, f)] = ""
	}
	replace[abs(b, "doc.go")] = abs(b, "testdata/none/none.go")
	overlay := must.Get(json.Marshal(map[string]any{"Replace": replace}))(b)
	list, at := filepath.Join(b.TempDir(), "overlay.json"), filepath.Join(b.TempDir(), "sluice")
	must.OK(b, os.WriteFile(list, overlay, 0o600))
	build := func(flags ...string) (file, code uint64) {
		args := append(append([]string{"build"}, flags...), "-buildvcs=false", "-ldflags=-s -w", "-o", at, "../cmd/sluice")
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		must.Run(b, cmd)
		info := must.Get(os.Stat(at))(b)
		f := must.Get(elf.Open(at))(b)
		defer f.Close()
		return uint64(info.Size()), f.Section(".text").Size
	}
	for b.Loop() {
		file, code := build()
		lessFile, lessCode := build("-overlay", list)
		b.ReportMetric(float64(file-lessFile)/1000, "KB")
		b.ReportMetric(float64(code-lessCode)/1000, "KB-code")
	}
	b.ReportMetric(0, "ns/op")
}

func abs(b *testing.B, name string) string {
	b.Helper()
	return must.Get(filepath.Abs(name))(b)
}

// BenchmarkServer asks over UDP, one question after the other.
func BenchmarkServer(b *testing.B) {
	l := newLab(b, "shop.yaml")
	message := withOPT(b, "web.shop.svc.cluster.local.", 1232, 0)
	c := must.Get(net.Dial("udp", l.at.String()))(b)
	defer c.Close()
	reply := make([]byte, 2048)
	for b.Loop() {
		must.OK(b, must.Err(c.Write(message)))
		must.OK(b, must.Err(c.Read(reply)))
	}
}

// BenchmarkRate asks over UDP at 10,000 questions a second, each at its time whether the last
// one is answered or not, and reports how late answers are, and how many are lost.
func BenchmarkRate(b *testing.B) {
	const pause = time.Second / 10_000
	l := newLab(b, "shop.yaml")
	message := withOPT(b, "web.shop.svc.cluster.local.", 1232, 0)
	c := must.Get(net.Dial("udp", l.at.String()))(b)
	defer c.Close()
	begin, cpu := time.Now(), cpuTime()
	sent := make([]atomic.Int64, b.N) // after begin, in nanoseconds
	go func() {
		runtime.LockOSThread() // Go's own timers are late by up to a millisecond
		for i := range b.N {
			for wait := time.Duration(i)*pause - time.Since(begin); wait > 0; wait = time.Duration(i)*pause - time.Since(begin) {
				ts := unix.NsecToTimespec(wait.Nanoseconds())
				_ = unix.Nanosleep(&ts, nil) // the loop looks at the time again
			}
			message[0], message[1] = byte(i>>8), byte(i)
			sent[i].Store(int64(time.Since(begin)))
			_, _ = c.Write(message) // lost ones are counted
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
	}()
	var late []time.Duration
	reply := make([]byte, 2048)
	for i := 0; len(late) < b.N; {
		if _, err := c.Read(reply); err != nil {
			break
		}
		i += int(int16((uint16(reply[0])<<8 | uint16(reply[1])) - uint16(i)))
		late = append(late, time.Since(begin)-time.Duration(sent[i].Load()))
	}
	if len(late) == 0 {
		b.Fatal("no answer")
	}
	slices.Sort(late)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(b.N-len(late)), "lost")
	b.ReportMetric(float64((cpuTime()-cpu).Microseconds())/float64(b.N), "cpu-us/op") // of asking, too
	for name, share := range map[string]float64{"p50-us": 0.5, "p99-us": 0.99} {
		b.ReportMetric(float64(late[int(share*float64(len(late)-1))].Microseconds()), name)
	}
}
