package demo

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The proxy's own reader takes the manifests without a word, and the model
// knows the addresses that the story talks about.
func TestManifestsAreUnderstood(t *testing.T) {
	for _, ipv6 := range []bool{true, false} {
		d := filled(t, ipv6)
		snapshot, said := readManifests(t, d.path)
		check.Textf(t, said, "", "ipv6 %v: the reader said", ipv6)
		if len(snapshot.Problems) > 0 {
			t.Errorf("ipv6 %v: problems: %v", ipv6, snapshot.Problems)
		}
		if want := 1 + btoi(ipv6); !snapshot.Node.Found || len(snapshot.Node.Addresses) != want {
			t.Errorf("ipv6 %v: node %+v, want %d addresses", ipv6, snapshot.Node, want)
		}
		for _, svc := range shopServices() {
			checkPort(t, snapshot, svc, svc.vip(v4), true, pods[svc.name])
			checkPort(t, snapshot, svc, svc.vip(v6), ipv6, pods[svc.name])
		}
	}
}

// pods are those that the story says serve a service.
var pods = map[string][]string{
	"web":    {"ash", "birch", "cedar"},
	"cart":   {"ash", "birch", "cedar"},
	"search": {"ash", "dogwood", "elm"},
}

func filled(t *testing.T, ipv6 bool) *manifestDir {
	t.Helper()
	d := &manifestDir{path: filepath.Join(t.TempDir(), "manifests"), ipv6: ipv6}
	must.OK(t, d.fill())
	return d
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func checkPort(t *testing.T, snapshot *service.Snapshot, svc *shopService, vip netip.AddrPort, want bool, wantPods []string) {
	t.Helper()
	verdict := policy.Compile(nil, snapshot, policy.Config{}).Resolve(service.TCP, vip.Addr(), vip)
	port, kind := verdict.Port, verdict.Kind
	check.Equalf(t, port != nil, want, "%s at %s: found", svc, vip)
	if port == nil {
		return
	}
	var names []string
	for _, e := range port.Families[service.FamilyOf(vip.Addr())].Endpoints {
		names = append(names, e.Pod.Name)
		if i := slices.Index(backendNames, e.Pod.Name); e.Addr.Addr() != backendAddr(i, v4) && e.Addr.Addr() != backendAddr(i, v6) {
			t.Errorf("%s: the address of %s is %s", svc, e.Pod.Name, e.Addr)
		}
		if e.Pod.Namespace != "shop" || e.Node() != "node-b" || e.Zone() != "zone-b" || !e.Ready || e.Addr.Port() != backendPort {
			t.Errorf("%s at %s: endpoint %+v", svc, vip, e)
		}
	}
	if kind != service.ClusterIP || port.Name.String() != svc.String()+":http" || (port.AffinityTimeout > 0) != (svc.name == "cart") {
		t.Errorf("%s at %s: %s %s, affinity %v", svc, vip, kind, port.Name, port.AffinityTimeout)
	}
	check.Textf(t, cmp.Diff(wantPods, names), "", "%s at %s: pods (-want +got)", svc, vip)
}

// readManifests returns what the directory says, and what the reader had to say
// about it.
func readManifests(t *testing.T, dir string) (*service.Snapshot, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var said bytes.Buffer
	var snapshot *service.Snapshot
	watcher := manifests.New(dir, manifests.Options{Logger: zerolog.New(&said).Level(zerolog.WarnLevel)})
	err := watcher.Run(ctx, func(c service.Change) {
		if snapshot == nil {
			snapshot = service.NewStore(service.StoreOptions{NodeName: "node-a"}).Apply(c)
			cancel()
		}
	})
	if snapshot == nil {
		t.Fatalf("nothing was read: %v\n%s", err, said.String())
	}
	return snapshot, said.String()
}

// The story's changes replace whole files.
func TestChangedManifests(t *testing.T) {
	d := filled(t, true)
	for svc, pods := range map[*shopService][]string{{"web", 10}: {"ash", "cedar", "elm"}, {"soon", 40}: {"elm"}} {
		must.OK(t, d.change(svc))
		snapshot, _ := readManifests(t, d.path)
		checkPort(t, snapshot, svc, svc.vip(v4), true, pods)
		checkPort(t, snapshot, svc, svc.vip(v6), true, pods)
	}
	list, err := os.ReadDir(d.path)
	if err != nil || len(list) != 5 {
		t.Errorf("%d files, %v; want 5: no drafts left", len(list), err)
	}
}

func serviceNamed(t *testing.T, name string) *shopService {
	t.Helper()
	for _, s := range shopServices() {
		if s.name == name {
			return s
		}
	}
	t.Fatalf("no service %q", name)
	return nil
}
