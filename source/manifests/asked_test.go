package manifests

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

var devRanges = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

// serve returns what the Store makes of a catalog's files.
func serve(t *testing.T, c *catalog, store *service.Store, files map[string]string) *service.Snapshot {
	t.Helper()
	for name, text := range files {
		content, findings := decode(name, []byte(text), Options{Allocate: devRanges})
		if hasErrors(findings) {
			t.Fatal(findings)
		}
		c.set(name, content.objects)
	}
	change, findings := c.commit()
	if len(findings) > 0 {
		t.Fatal(findings)
	}
	change.Host = &service.Host{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	return store.Apply(change)
}

// served returns "shop/web 10.96.1.2:80 -> 127.0.0.1:3000 127.0.0.1:3001" for each port
// and family.
func served(s *service.Snapshot) (lines []string) {
	for _, p := range s.Ports {
		if p == nil {
			continue
		}
		for _, v := range p.Families {
			if !v.Exists {
				continue
			}
			line := fmt.Sprintf("%s %s ->", p.Name, netip.AddrPortFrom(v.ClusterIP, p.Port))
			for _, e := range v.Endpoints {
				line += fmt.Sprintf(" %s", e.Addr)
			}
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return lines
}

const annotatedService = `
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: shop, annotations: {sluice.dev/endpoints: "%s"}}
spec: {%s}
`

// TestAskedEndpoints serves Services by processes that the annotation names.
func TestAskedEndpoints(t *testing.T) {
	for _, row := range []struct{ asked, spec, want string }{
		{"127.0.0.1:3000", "clusterIP: 10.96.0.1, ports: [{port: 80}]", "shop/web 10.96.0.1:80 -> 127.0.0.1:3000"},
		{"localhost:3000", "clusterIP: 10.96.0.1, ports: [{port: 80}]", "shop/web 10.96.0.1:80 -> 127.0.0.1:3000"},
		{"127.0.0.1:3001, 10.0.0.7:8080,192.0.2.1:99", "clusterIP: 10.96.0.1, ports: [{port: 80}]", "shop/web 10.96.0.1:80 -> 10.0.0.7:8080 127.0.0.1:3001 192.0.2.1:99"},
		{"127.0.0.1", "clusterIP: 10.96.0.1, ports: [{name: a, port: 80, targetPort: 8000}, {name: b, port: 81}]", "shop/web:a 10.96.0.1:80 -> 127.0.0.1:8000; shop/web:b 10.96.0.1:81 -> 127.0.0.1:81"},
		{"a=127.0.0.1:7000, b=127.0.0.1:7001", "clusterIP: 10.96.0.1, ports: [{name: a, port: 80}, {name: b, port: 81}]", "shop/web:a 10.96.0.1:80 -> 127.0.0.1:7000; shop/web:b 10.96.0.1:81 -> 127.0.0.1:7001"},
		{"[::1]:3000", "clusterIP: 'fd00:10:96::1', ports: [{port: 80}]", "shop/web [fd00:10:96::1]:80 -> [::1]:3000"},
	} {
		c, store := newCatalog(nil), service.NewStore(service.StoreOptions{OwnEndpoints: true})
		got := strings.Join(served(serve(t, c, store, map[string]string{"a.yaml": fmt.Sprintf(annotatedService, "web", row.asked, row.spec)})), "; ")
		if got != row.want || len(store.Snapshot().Problems) > 0 {
			t.Errorf("%s: %s\nwant %s; problems %v", row.asked, got, row.want, store.Snapshot().Problems)
		}
		// Without the right, as in a cluster, the same slices lead nowhere near the node.
		c, store = newCatalog(nil), service.NewStore(service.StoreOptions{})
		got = strings.Join(served(serve(t, c, store, map[string]string{"a.yaml": fmt.Sprintf(annotatedService, "web", row.asked, row.spec)})), "; ")
		if strings.Contains(got, "-> 127") || strings.Contains(got, "[::1]") || strings.Contains(got, "192.0.2.1") {
			t.Errorf("%s: a tenant's endpoints are %s", row.asked, got)
		}
	}
}

// TestAskedMistakes names what is wrong with the annotation, and what would be right.
func TestAskedMistakes(t *testing.T) {
	const one, two = "clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: http}]", "clusterIP: 10.96.0.1, ports: [{name: a, port: 80}, {name: b, port: 81}]"
	for _, row := range []struct{ asked, spec, want string }{
		{"", one, "names no endpoint"},
		{"3000", one, "not an address and a port such as 127.0.0.1:3000"},
		{"127.0.0.1:0", one, "not an address and a port"},
		{"web:3000", one, "not an address and a port"},
		{"127.0.0.1", one, `targetPort "http" is a name: write the number, as 127.0.0.1:8080`},
		{"127.0.0.1:3000", two, `could be of any of the Service's ports: write its name before it, as a=127.0.0.1:3000`},
		{"c=127.0.0.1:3000", two, `the Service has no port "c", only "a" (TCP), "b" (TCP)`},
		{"224.0.0.1:80", one, "it is a multicast address"},
		{"0.0.0.0:80", one, "0.0.0.0/8"},
		{"[fe80::1%eth0]:80", one, "leave out the zone %eth0"},
		{"[::1%lo]:80", one, "leave out the zone %lo"},
		{"127.0.0.1:80", "type: ExternalName, externalName: a.example", "has no endpoints"},
	} {
		_, findings := decode("a.yaml", []byte(fmt.Sprintf(annotatedService, "web", row.asked, row.spec)), Options{})
		if !hasErrors(findings) || !strings.Contains(firstError(findings), row.want) {
			t.Errorf("%q: %v, want %q", row.asked, findings, row.want)
		}
	}
}

// TestSlicesGoBeforeAsked: slices of the manifests replace the annotation's.
func TestSlicesGoBeforeAsked(t *testing.T) {
	c, store := newCatalog(nil), service.NewStore(service.StoreOptions{OwnEndpoints: true})
	web := fmt.Sprintf(annotatedService, "web", "127.0.0.1:3000", "clusterIP: 10.96.0.1, ports: [{port: 80}]")
	slice := "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\nports: [{port: 8080}]\nendpoints: [{addresses: [10.1.0.1]}]\n"
	for _, step := range []struct{ slice, want string }{{"", "127.0.0.1:3000"}, {slice, "10.1.0.1:8080"}, {"", "127.0.0.1:3000"}} {
		got := strings.Join(served(serve(t, c, store, map[string]string{"a.yaml": web, "b.yaml": step.slice})), "; ")
		check.Equal(t, got, "shop/web 10.96.0.1:80 -> "+step.want)
	}
	if got := served(serve(t, c, store, map[string]string{"a.yaml": ""})); len(got) > 0 || len(c.mirrored) > 0 {
		t.Errorf("left: %v %v", got, c.mirrored)
	}
}

// TestAllocation gives the same addresses to the same names, whatever the order of files
// is, and none twice.
func TestAllocation(t *testing.T) {
	files := func(prefix string) map[string]string {
		all := make(map[string]string)
		for i := range 300 {
			all[fmt.Sprintf("%s%d.yaml", prefix, i)] = fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: web-%d, namespace: shop}\nspec: {ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}\n", i)
		}
		return all
	}
	c, store := newCatalog(devRanges), service.NewStore(service.StoreOptions{})
	first := served(serve(t, c, store, files("a")))
	if again := served(serve(t, newCatalog(devRanges), service.NewStore(service.StoreOptions{}), files("z"))); !slices.Equal(first, again) {
		t.Error("a second start gives other addresses")
	}
	seen := make(map[netip.AddrPort]string)
	for _, p := range store.Snapshot().Ports {
		for f, v := range p.Families {
			at := netip.AddrPortFrom(v.ClusterIP, p.Port)
			if !v.Exists || !devRanges[f].Contains(v.ClusterIP) || seen[at] != "" {
				t.Fatalf("%s: %s of %s, also of %q", p.Name, at, devRanges[f], seen[at])
			}
			seen[at] = p.Name.String()
		}
	}
	// A change of one Service moves no other, and an edit keeps its own address.
	const edited = "apiVersion: v1\nkind: Service\nmetadata: {name: web-7, namespace: shop}\nspec: {ipFamilyPolicy: PreferDualStack, ports: [{name: x, port: 80}]}\n"
	after := served(serve(t, c, store, map[string]string{"a7.yaml": edited, "a8.yaml": ""}))
	for _, line := range first {
		name, _, _ := strings.Cut(line, " ")
		want := strings.Replace(line, "shop/web-7 ", "shop/web-7:x ", 1)
		if slices.Contains(after, want) == (name == "shop/web-8") {
			t.Errorf("%s: after the change %t", want, slices.Contains(after, want))
		}
	}
	check.Equalf(t, len(c.addresses.taken), 2*299, "addresses are taken")
}

// TestAllocationAvoidsOthers fills a small range: with an address of a manifest, with those
// that names hash to, and with none left.
func TestAllocationAvoidsOthers(t *testing.T) {
	small := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/29")}
	c := newCatalog(small)
	text := "apiVersion: v1\nkind: Service\nmetadata: {name: own}\nspec: {clusterIP: 10.96.0.3, ports: [{port: 80}]}\n"
	for i := range 7 {
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: web-%d}\nspec: {ports: [{port: 80}]}\n", i)
	}
	content, _ := decode("a.yaml", []byte(text), Options{Allocate: small})
	c.set("a.yaml", content.objects)
	change, _ := c.commit()
	var given []string
	for _, svc := range change.Services {
		given = append(given, svc.Spec.ClusterIP)
	}
	slices.Sort(given)
	want := []string{"", "", "10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.0.4", "10.96.0.5", "10.96.0.6"}
	check.EqualSlicesf(t, given, want, "given")
}

// TestAllocationFamilies follows ipFamilies and ipFamilyPolicy.
func TestAllocationFamilies(t *testing.T) {
	a := newAllocator(devRanges)
	for _, row := range []struct {
		spec corev1.ServiceSpec
		want string // families of the addresses
	}{
		{corev1.ServiceSpec{}, "4"},
		{corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol}}, "6"},
		{corev1.ServiceSpec{IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack)}, "46"},
		{corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}, IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack)}, "64"},
		{corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone}, ""},
		{corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName}, ""},
	} {
		svc := &corev1.Service{Spec: row.spec}
		got := ""
		for _, text := range a.assign(service.Name{Name: "web"}, svc).Spec.ClusterIPs {
			if strings.Contains(text, ":") {
				got += "6"
			} else {
				got += "4"
			}
		}
		check.Equalf(t, got, row.want, "%+v", row.spec)
	}
}
