package coredns

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/dns"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

const testdata = "../../../dns/testdata/"

// read returns the objects of Sluice's own test for both: as they are, and in JSON by kind,
// with what an API server adds.
func read(t *testing.T) (change service.Change, objects map[string][]string) {
	t.Helper()
	text := must.Read(t, testdata+"shop.yaml")
	objects = map[string][]string{"Namespace": {`{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}`}}
	add := func(kind string, o any) {
		data := must.Get(json.Marshal(o))(t)
		objects[kind] = append(objects[kind], string(data))
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		svc, slice := new(corev1.Service), new(discoveryv1.EndpointSlice)
		must.OK(t, errors.Join(yaml.Unmarshal([]byte(document), svc), yaml.Unmarshal([]byte(document), slice)))
		if svc.Kind == "EndpointSlice" {
			change.EndpointSlices = append(change.EndpointSlices, slice.DeepCopy())
			for i := range slice.Ports {
				slice.Ports[i].Protocol = cmp.Or(slice.Ports[i].Protocol, new(corev1.ProtocolTCP))
			}
			add(svc.Kind, slice)
			continue
		}
		change.Services = append(change.Services, svc.DeepCopy())
		for i := range svc.Spec.Ports {
			svc.Spec.Ports[i].Protocol = cmp.Or(svc.Spec.Ports[i].Protocol, corev1.ProtocolTCP)
		}
		if svc.Spec.ClusterIP != "" && len(svc.Spec.ClusterIPs) == 0 {
			svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP}
		}
		add(svc.Kind, svc)
	}
	return change, objects
}

// resolver answers for the world outside of the cluster.
func resolver(t *testing.T) string {
	t.Helper()
	started := make(chan struct{})
	s := &mdns.Server{Addr: "127.0.0.1:0", Net: "udp", NotifyStartedFunc: func() { close(started) }}
	s.Handler = mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
		m := new(mdns.Msg).SetReply(q)
		switch record := q.Question[0]; {
		case !strings.HasSuffix(strings.ToLower(record.Name), "example.com."):
			m.Rcode = mdns.RcodeNameError
		case record.Qtype == mdns.TypeA:
			m.Answer = []mdns.RR{&mdns.A{Hdr: mdns.RR_Header{Name: record.Name, Rrtype: mdns.TypeA, Class: mdns.ClassINET}, A: []byte{192, 0, 2, 7}}}
		}
		_ = w.WriteMsg(m)
	})
	go func() { _ = s.ListenAndServe() }()
	t.Cleanup(func() { _ = s.Shutdown() })
	<-started
	return s.PacketConn.LocalAddr().String()
}

// startSluice returns where Sluice answers.
func startSluice(t *testing.T, change service.Change, forward string) string {
	t.Helper()
	at := netip.MustParseAddrPort("127.83.76.54:10053")
	s, err := dns.Listen(dns.Options{Zone: "cluster.local", Addresses: []netip.AddrPort{at}, Forward: []netip.AddrPort{netip.MustParseAddrPort(forward)}})
	must.OK(t, err)
	s.Set(dns.NewCatalog().Apply(change), nil, service.Node{})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Serve(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	return at.String()
}

// startCoreDNS returns where CoreDNS answers, with the Corefile of a cluster.
func startCoreDNS(t *testing.T, api, forward string) string {
	t.Helper()
	dnsserver.Directives = []string{"bind", "errors", "kubernetes", "forward"}
	caddy.Quiet, dnsserver.Quiet = true, true
	instance, err := caddy.Start(caddy.CaddyfileInput{ServerTypeName: "dns", Contents: []byte(`.:0 {
		bind 127.0.0.1
		errors
		kubernetes cluster.local in-addr.arpa ip6.arpa {
			endpoint ` + api + `
			startup_timeout 2m
			zonal
			fallthrough in-addr.arpa ip6.arpa
		}
		forward . ` + forward + `
	}`)})
	must.OK(t, err)
	t.Cleanup(func() { _ = instance.Stop() })
	return instance.Servers()[0].LocalAddr().String()
}

// reply is what a server answers: the rows' form of it, and all that it says.
type reply struct{ short, long string }

func ask(t *testing.T, server, name, kind string) (r reply) {
	t.Helper()
	c := mdns.Client{Timeout: 30 * time.Second}
	m, _, err := c.Exchange(new(mdns.Msg).SetQuestion(name, mdns.StringToType[kind]), server)
	if err != nil {
		t.Fatal(name, err)
	}
	data := func(record mdns.RR) string {
		switch record := record.(type) {
		case *mdns.SOA: // serial numbers differ
			return "SOA " + record.Ns
		case *mdns.CNAME:
			return "= " + record.Target
		}
		return strings.TrimPrefix(record.String(), record.Header().String())
	}
	var short, long []string
	for i, list := range [][]mdns.RR{m.Answer, m.Ns, m.Extra} {
		for _, record := range list {
			if i == 0 {
				short = append(short, data(record))
			}
			long = append(long, fmt.Sprint(i, " ", record.Header().Name, " ", data(record)))
		}
	}
	slices.Sort(short)
	slices.Sort(long)
	if m.Rcode != mdns.RcodeSuccess {
		short = slices.Insert(short, 0, mdns.RcodeToString[m.Rcode])
	}
	r.short = cmp.Or(strings.Join(short, ", "), "-")
	// CoreDNS has the case of an external name, and takes that of the zone from the question.
	r.long = strings.ToLower(fmt.Sprintf("%s, authoritative %t %q", mdns.RcodeToString[m.Rcode], m.Authoritative, long))
	return r
}

// TestSameAnswers asks both the rows of Sluice's own test. Where a row says what CoreDNS
// answers instead, that is checked too.
func TestSameAnswers(t *testing.T) {
	data := must.Read(t, testdata+"specification.txt")
	change, objects := read(t)
	outside := resolver(t)
	coredns, sluice := startCoreDNS(t, serveAPI(t, objects), outside), startSluice(t, change, outside)
	asked, differ := 0, 0
	rows := strings.Split(string(data), "\n")
	for i, row := range rows {
		question, _, is := strings.Cut(row, " : ")
		if !is {
			continue
		}
		asked++
		name, kind, _ := strings.Cut(question, " ")
		theirs, ours := ask(t, coredns, name, kind), ask(t, sluice, name, kind)
		if note, differs := strings.CutPrefix(rows[i+1], "  CoreDNS: "); differs {
			differ++
			if want, _, _ := strings.Cut(note, "; "); theirs.short != want || ours.short == want {
				t.Errorf("%s\nCoreDNS %s, and the row says %s\n Sluice %s", question, theirs.short, want, ours.short)
			}
		} else if ours.long != theirs.long {
			t.Errorf("%s\nCoreDNS %s\n Sluice %s", question, theirs.long, ours.long)
		}
	}
	t.Logf("%d questions; CoreDNS differs in %d, with a reason each", asked, differ)
	if asked < 60 || differ > 12 {
		t.Error("too few rows are compared")
	}
}
