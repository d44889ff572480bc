package demo

import (
	"bytes"
	"context"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestManifestsAreReadable(t *testing.T) {
	for name, text := range map[string]string{
		"nodes.yaml": nodesYAML(true),
		"cart.yaml":  serviceNamed(t, "cart").yaml(true),
		"soon.yaml":  serviceNamed(t, "soon").yaml(false),
	} {
		golden := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), text); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
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

// The proxy's own reader takes the manifests without a word, and the model
// knows the addresses that the story talks about.
func TestManifestsAreUnderstood(t *testing.T) {
	for _, ipv6 := range []bool{true, false} {
		s := &shelf{dir: filepath.Join(t.TempDir(), "manifests"), ipv6: ipv6}
		if err := s.fill(shopServices()); err != nil {
			t.Fatal(err)
		}
		snapshot, said := readManifests(t, s.dir)
		if said != "" {
			t.Errorf("ipv6 %v: the reader said:\n%s", ipv6, said)
		}
		if len(snapshot.Problems) > 0 {
			t.Errorf("ipv6 %v: problems: %v", ipv6, snapshot.Problems)
		}
		if want := 1 + btoi(ipv6); !snapshot.Node.Found || len(snapshot.Node.Addresses) != want {
			t.Errorf("ipv6 %v: node %+v, want %d addresses", ipv6, snapshot.Node, want)
		}
		for _, svc := range shopServices() {
			v4, v6 := svc.vips()
			checkPort(t, snapshot, svc, v4, true)
			checkPort(t, snapshot, svc, v6, ipv6)
		}
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func checkPort(t *testing.T, snapshot *service.Snapshot, svc *shopService, vip netip.AddrPort, want bool) {
	t.Helper()
	verdict := policy.Compile(nil, snapshot, policy.Config{}).Resolve(service.TCP, vip.Addr(), vip)
	port, kind := verdict.Port, verdict.Kind
	if (port != nil) != want {
		t.Errorf("%s at %s: found %v, want %v", svc, vip, port != nil, want)
	}
	if port == nil {
		return
	}
	var pods []string
	for _, e := range port.Families[service.FamilyOf(vip.Addr())].Endpoints {
		pods = append(pods, e.Pod.Name)
		if e.Pod.Namespace != "shop" || e.Node != "node-b" || e.Zone != "zone-b" || !e.Ready || e.Addr.Port() != backendPort {
			t.Errorf("%s at %s: endpoint %+v", svc, vip, e)
		}
	}
	if kind != service.ClusterIP || port.Name.String() != svc.String()+":http" || (port.AffinityTimeout > 0) != svc.affinity {
		t.Errorf("%s at %s: %s %s, affinity %v", svc, vip, kind, port.Name, port.AffinityTimeout)
	}
	if diff := cmp.Diff(svc.pods, pods); diff != "" {
		t.Errorf("%s at %s: pods (-want +got):\n%s", svc, vip, diff)
	}
}

// readManifests gives what the directory says, and what the reader had to say
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

func TestShelfReplacesWholeFiles(t *testing.T) {
	s := &shelf{dir: filepath.Join(t.TempDir(), "manifests"), ipv6: true}
	services := shopServices()
	if err := s.fill(services); err != nil {
		t.Fatal(err)
	}
	web := services[0]
	web.pods = []string{"elm"}
	if err := s.put(web); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(s.dir, "web.yaml"))
	if err != nil || string(got) != web.yaml(true) || strings.Contains(string(got), "name: birch") {
		t.Errorf("web.yaml: %v\n%s", err, got)
	}
	list, err := os.ReadDir(s.dir)
	if err != nil || len(list) != len(services)+1 {
		t.Errorf("%d files, %v; want %d: no drafts left", len(list), err, len(services)+1)
	}
}
