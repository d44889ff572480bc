package dns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// read returns the objects of a file.
func read(t testing.TB, name string) (c service.Change) {
	t.Helper()
	data := must.Read(t, "testdata/"+name)
	return objects(t, string(data))
}

func objects(t testing.TB, text string) (c service.Change) {
	t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		var kind metav1.TypeMeta
		decode := func(v any) {
			if err := kyaml.NewYAMLOrJSONDecoder(strings.NewReader(document), 4096).Decode(v); err != nil && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
		}
		switch decode(&kind); kind.Kind {
		case "Service":
			o := new(corev1.Service)
			decode(o)
			c.Services = append(c.Services, o)
		case "EndpointSlice":
			o := new(discoveryv1.EndpointSlice)
			decode(o)
			c.EndpointSlices = append(c.EndpointSlices, o)
		case "Node":
			o := new(corev1.Node)
			decode(o)
			c.Nodes = append(c.Nodes, o)
		default:
			t.Fatalf("kind %q", kind.Kind)
		}
	}
	return c
}

// lab is a Server on loopback with the objects of a file.
type lab struct {
	*Server
	catalog *Catalog
	at      netip.AddrPort
}

// listen opens a Server on loopback.
func listen(t testing.TB, o Options) *Server {
	t.Helper()
	o.Addresses = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}
	return must.Get(Listen(o))(t)
}

func newLab(t testing.TB, file string, forward ...netip.AddrPort) *lab {
	t.Helper()
	s := listen(t, Options{Zone: "cluster.local", Forward: forward})
	l := &lab{Server: s, catalog: NewCatalog(), at: s.Addresses()[0]}
	l.apply(read(t, file))
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Serve(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	return l
}

// Addresses returns where the Server listens.
func (s *Server) Addresses() (list []netip.AddrPort) {
	for _, c := range s.udp {
		list = append(list, c.LocalAddr().(*net.UDPAddr).AddrPort())
	}
	return list
}

// TestForwardedQuestions counts those that resolvers were asked, and those that were too many.
func TestForwardedQuestions(t *testing.T) {
	silent := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	defer silent.Close()
	l := newLab(t, "shop.yaml", silent.LocalAddr().(*net.UDPAddr).AddrPort())
	for range mostForwarded {
		l.forward.waiting <- struct{}{}
	}
	c := must.Get(net.Dial("udp", l.at.String()))(t)
	defer c.Close()
	count := func(what string, want Stats) {
		t.Helper()
		wait.Equal(t, what, time.Minute, want, l.Stats)
	}
	ask := func() {
		t.Helper()
		must.OK(t, must.Err(c.Write(withOPT(t, "example.com.", 1232, 0))))
	}
	ask()
	count("too many wait", Stats{Failed: 1})
	<-l.forward.waiting
	ask()
	count("a resolver is asked", Stats{Failed: 1, Forwarded: 1})
}

func (l *lab) apply(c service.Change) { l.Set(l.catalog.Apply(c), nil, service.Node{}) }

// exchange sends a message, and returns the reply.
func (l *lab) exchange(t testing.TB, network string, message []byte) []byte {
	t.Helper()
	c, err := net.Dial(network, l.at.String())
	must.OK(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	var reply []byte
	if network == "tcp" {
		if err = writeMessage(c, message); err == nil {
			reply, err = readMessage(c)
		}
	} else if _, err = c.Write(message); err == nil {
		reply = make([]byte, 65535)
		var n int
		n, err = c.Read(reply)
		reply = reply[:n]
	}
	must.OK(t, err)
	return reply
}

func (l *lab) ask(t testing.TB, network, name string, kind dnsmessage.Type) dnsmessage.Message {
	t.Helper()
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 77, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	packed := must.Get(q.Pack())(t)
	var m dnsmessage.Message
	must.OK(t, m.Unpack(l.exchange(t, network, packed)))
	if m.ID != 77 || !m.Response || !m.RecursionDesired || len(m.Questions) != 1 || m.Questions[0] != q.Questions[0] {
		t.Errorf("%s %s: header %+v, questions %v", name, kind, m.Header, m.Questions)
	}
	return m
}

// text returns a reply as a table shows it: the code if it is not success, and the records,
// sorted; "-" stands for none.
func text(m *dnsmessage.Message) string {
	var parts []string
	for _, r := range m.Answers {
		parts = append(parts, body(r))
	}
	slices.Sort(parts)
	switch m.RCode {
	case dnsmessage.RCodeSuccess:
		if len(parts) == 0 {
			return "-"
		}
	case dnsmessage.RCodeNameError:
		parts = append([]string{"NXDOMAIN"}, parts...)
	case dnsmessage.RCodeRefused:
		parts = append([]string{"REFUSED"}, parts...)
	default:
		parts = append([]string{m.RCode.String()}, parts...)
	}
	return strings.Join(parts, ", ")
}

func body(r dnsmessage.Resource) string {
	switch b := r.Body.(type) {
	case *dnsmessage.AResource:
		return netip.AddrFrom4(b.A).String()
	case *dnsmessage.AAAAResource:
		return netip.AddrFrom16(b.AAAA).String()
	case *dnsmessage.SRVResource:
		return fmt.Sprintf("%d %d %d %s", b.Priority, b.Weight, b.Port, b.Target)
	case *dnsmessage.PTRResource:
		return b.PTR.String()
	case *dnsmessage.CNAMEResource:
		return "= " + b.CNAME.String()
	case *dnsmessage.TXTResource:
		return fmt.Sprintf("%q", strings.Join(b.TXT, `" "`))
	case *dnsmessage.NSResource:
		return b.NS.String()
	case *dnsmessage.SOAResource:
		return "SOA " + b.NS.String()
	}
	return r.Header.Type.String()
}

const (
	tA     = dnsmessage.TypeA
	tAAAA  = dnsmessage.TypeAAAA
	tSRV   = dnsmessage.TypeSRV
	tPTR   = dnsmessage.TypePTR
	tTXT   = dnsmessage.TypeTXT
	tCNAME = dnsmessage.TypeCNAME
)

// TestSpecification asks the rows of specification.txt over UDP and TCP.
func TestSpecification(t *testing.T) {
	l := newLab(t, "shop.yaml")
	data := must.Read(t, "testdata/specification.txt")
	kinds := make(map[string]dnsmessage.Type)
	for k := range dnsmessage.Type(256) {
		kinds[strings.TrimPrefix(k.String(), "Type")] = k
	}
	rule := ""
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, " ") { // what CoreDNS says
			continue
		}
		question, want, is := strings.Cut(strings.TrimSpace(line), " : ")
		if !is {
			rule = line
			continue
		}
		name, kindName, _ := strings.Cut(question, " ")
		kind := kinds[kindName]
		for _, network := range []string{"udp", "tcp"} {
			m := l.ask(t, network, name, kind)
			check.Textf(t, text(&m), want, "%s%s %s over %s", rule, name, kind, network)
			ours := !strings.HasPrefix(want, "REFUSED")
			check.Equalf(t, m.Authoritative, ours, "%s: authoritative", name)
			// RFC 2308: an answer without the type has the SOA.
			outside := strings.HasPrefix(name, "outside.")
			wantSOA := ours && !outside && !slices.ContainsFunc(m.Answers, func(r dnsmessage.Resource) bool { return r.Header.Type == kind })
			check.Equalf(t, len(m.Authorities) == 1 && m.Authorities[0].Header.Type == dnsmessage.TypeSOA, wantSOA, "%s %s: SOA", name, kind)
		}
	}
	if m := l.ask(t, "udp", "loop.shop.svc.cluster.local.", tA); m.RCode != dnsmessage.RCodeServerFailure {
		t.Errorf("an alias of itself: %s", text(&m))
	}
}

// TestChanges applies changes one by one: what is asked follows each.
func TestChanges(t *testing.T) {
	l := newLab(t, "shop.yaml")
	check := func(name string, kind dnsmessage.Type, want string) {
		t.Helper()
		if m := l.ask(t, "udp", name, kind); text(&m) != want {
			t.Errorf("%s: %s, want %s", name, text(&m), want)
		}
	}
	slice := func(name string) service.ObjectKey {
		return service.ObjectKey{Kind: service.KindEndpointSlice, Name: service.Name{Namespace: "shop", Name: name}}
	}
	const db = "db.shop.svc.cluster.local."
	l.apply(service.Change{Deleted: []service.ObjectKey{slice("db-4")}})
	check(db, tA, "-")
	check(db, tAAAA, "fd00::5")
	check("5.0.244.10.in-addr.arpa.", tPTR, "REFUSED")
	l.apply(service.Change{Deleted: []service.ObjectKey{slice("db-6")}})
	check(db, tA, "NXDOMAIN")
	moved := objects(t, "{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.96.0.99, ports: [{port: 80}]}}")
	l.apply(moved)
	check("web.shop.svc.cluster.local.", tA, "10.96.0.99")
	check("10.0.96.10.in-addr.arpa.", tPTR, "REFUSED")
	check("99.0.96.10.in-addr.arpa.", tPTR, "web.shop.svc.cluster.local.")
	var gone service.Change
	for _, svc := range read(t, "shop.yaml").Services {
		gone.Deleted = append(gone.Deleted, service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: svc.Namespace, Name: svc.Name}})
	}
	l.apply(gone)
	check("shop.svc.cluster.local.", tA, "NXDOMAIN")
	check("99.0.96.10.in-addr.arpa.", tPTR, "REFUSED")
	if n := l.catalog.names; len(n.spaces) != 0 || slices.ContainsFunc(n.reverse[:], func(m map[netip.Addr][]owner) bool { return len(m) > 0 }) {
		t.Errorf("names are left: %v", n.spaces)
	}
}

// TestTruncation asks for more endpoints than a datagram takes.
func TestTruncation(t *testing.T) {
	l := newLab(t, "shop.yaml")
	var b bytes.Buffer
	b.WriteString("apiVersion: v1\nkind: Service\nmetadata: {name: many, namespace: shop}\nspec: {clusterIP: None}\n---\n" +
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: many, namespace: shop, labels: {kubernetes.io/service-name: many}}\naddressType: IPv4\nendpoints:\n")
	for i := range 200 {
		fmt.Fprintf(&b, "- {addresses: [10.244.1.%d]}\n", i+1)
	}
	l.apply(objects(t, b.String()))
	const name = "many.shop.svc.cluster.local."
	m := l.ask(t, "udp", name, tA)
	if !m.Truncated || len(m.Answers) < 20 || len(m.Answers) > 30 {
		t.Errorf("over UDP: truncated %t, %d answers", m.Truncated, len(m.Answers))
	}
	if m = l.ask(t, "tcp", name, tA); m.Truncated || len(m.Answers) != 200 {
		t.Errorf("over TCP: truncated %t, %d answers", m.Truncated, len(m.Answers))
	}
	first := m.Answers[0].Body.(*dnsmessage.AResource).A
	if m = l.ask(t, "tcp", name, tA); m.Answers[0].Body.(*dnsmessage.AResource).A == first {
		t.Error("two answers begin with the same endpoint")
	}
}

// withOPT returns a question with EDNS.
func withOPT(t testing.TB, name string, size, version int) []byte {
	t.Helper()
	q := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: tA, Class: dnsmessage.ClassINET}}}
	var h dnsmessage.ResourceHeader
	_ = h.SetEDNS0(size, 0, false)
	h.TTL |= uint32(version) << 16
	q.Additionals = []dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{}}}
	return must.Get(q.Pack())(t)
}

// TestEDNS checks sizes and versions (RFC 6891).
func TestEDNS(t *testing.T) {
	l := newLab(t, "shop.yaml")
	for _, row := range []struct {
		version int
		want    dnsmessage.RCode
	}{{0, dnsmessage.RCodeSuccess}, {1, rcodeBadVers}} {
		var m dnsmessage.Message
		must.OK(t, m.Unpack(l.exchange(t, "udp", withOPT(t, "web.shop.svc.cluster.local.", 4096, row.version))))
		if len(m.Additionals) != 1 || m.Additionals[0].Header.Type != dnsmessage.TypeOPT || m.Additionals[0].Header.ExtendedRCode(m.RCode) != row.want {
			t.Errorf("version %d: %s, additionals %v", row.version, m.RCode, m.Additionals)
		}
		check.Equalf(t, int(m.Additionals[0].Header.Class), mostSize, "size")
	}
}

// TestNotUnderstood sends what is no question.
func TestNotUnderstood(t *testing.T) {
	l := newLab(t, "shop.yaml")
	question := withOPT(t, "web.shop.svc.cluster.local.", 4096, 0)
	change := func(f func(m []byte)) []byte {
		m := bytes.Clone(question)
		f(m)
		return m
	}
	for name, row := range map[string]struct {
		message []byte
		want    dnsmessage.RCode
	}{
		"an update":       {change(func(m []byte) { m[2] |= 5 << 3 }), dnsmessage.RCodeNotImplemented},
		"two questions":   {change(func(m []byte) { m[5] = 2 }), dnsmessage.RCodeFormatError},
		"no question":     {change(func(m []byte) { m[5], m[11] = 0, 0 })[:12:12], dnsmessage.RCodeFormatError},
		"half a question": {question[:20:20], dnsmessage.RCodeFormatError},
		"other class":     {change(func(m []byte) { m[12+28+3] = 3 }), dnsmessage.RCodeRefused},
	} {
		var m dnsmessage.Message
		if err := m.Unpack(l.exchange(t, "udp", row.message)); err != nil || m.RCode != row.want {
			t.Errorf("%s: %s, %v; want %s", name, m.RCode, err, row.want)
		}
	}
	for name, message := range map[string][]byte{"an answer": change(func(m []byte) { m[2] |= 0x80 }), "no header": question[:5:5]} {
		if reply, later := l.handle(message, netip.Addr{}, "udp"); reply != nil || later != nil {
			t.Errorf("%s was answered", name)
		}
	}
}

// TestForward has a second Server answer for another zone.
func TestForward(t *testing.T) {
	other := listen(t, Options{Zone: "example.com"})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { other.Serve(ctx); close(done) }()
	defer func() { stop(); <-done }()
	catalog := NewCatalog()
	other.Set(catalog.Apply(objects(t, "{apiVersion: v1, kind: Service, metadata: {name: web, namespace: far}, spec: {clusterIP: 192.0.2.7, ports: [{port: 80}]}}")), nil, service.Node{})

	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 1) // refuses
	// One that refuses all names, and one that cannot answer: both are passed over.
	refuses, unable := newLab(t, "shop.yaml"), newLab(t, "shop.yaml", dead)
	l := newLab(t, "shop.yaml", dead, refuses.at, unable.at, other.Addresses()[0])
	l.apply(objects(t, "{apiVersion: v1, kind: Service, metadata: {name: far, namespace: shop}, spec: {type: ExternalName, externalName: web.far.svc.example.com}}"))
	for _, row := range []struct{ name, want string }{
		{"web.far.svc.example.com.", "192.0.2.7"},
		{"no.far.svc.example.com.", "NXDOMAIN"},
		{"far.shop.svc.cluster.local.", "192.0.2.7, = web.far.svc.example.com."},
		{"web.shop.svc.cluster.local.", "10.96.0.10"},
	} {
		for _, network := range []string{"udp", "tcp"} {
			if m := l.ask(t, network, row.name, tA); text(&m) != row.want || !m.RecursionAvailable && strings.HasSuffix(row.name, "local.") {
				t.Errorf("%s over %s: %s, want %s; %+v", row.name, network, text(&m), row.want, m.Header)
			}
		}
	}
}
