package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/doctor"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/explain"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/test/must"
)

// named returns objects with a text wherever a tenant may write one. All but the
// names of ports and objects pass the API server's validation with any text.
func named(s string) service.Change {
	return service.Change{
		Services: []*corev1.Service{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "n" + s, Name: "s" + s, Annotations: map[string]string{
				"sluice.dev/balancer": s, "sluice.dev/udp-timeout": s, "sluice.dev/udp-responses": s, "service.kubernetes.io/topology-mode": s,
			}},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", s},
				ExternalIPs: []string{s}, LoadBalancerSourceRanges: []string{s},
				Ports: []corev1.ServicePort{{Name: "p" + s, Port: 80, Protocol: corev1.ProtocolTCP}},
			},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: s}}}},
		}},
		EndpointSlices: []*discoveryv1.EndpointSlice{{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "n" + s, Name: "e" + s, Labels: map[string]string{discoveryv1.LabelServiceName: "s" + s}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("p" + s), Port: ptr.To(int32(8080))}},
			Endpoints: []discoveryv1.Endpoint{
				{Addresses: []string{"10.1.0.1"}, NodeName: &s, Zone: &s, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "n" + s, Name: "p" + s}},
				{Addresses: []string{s}, NodeName: &s, Zone: &s, Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: s}}}},
			},
		}},
		Nodes: []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node" + s, Labels: map[string]string{corev1.LabelTopologyZone: s}}}},
	}
}

// outputs returns everything that leaves the program about such objects, by kind.
func outputs(t *testing.T, s string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	write := func(kind string, f func(b *bytes.Buffer)) {
		var b bytes.Buffer
		f(&b)
		out[kind] = b.String()
	}
	store := service.NewStore(service.StoreOptions{NodeName: "node" + s})
	snap := store.Apply(named(s))
	table := policy.Compile(nil, snap, policy.Config{NodeName: "node" + s})
	var port *service.Port
	for _, p := range snap.Ports {
		if p != nil {
			port = p
		}
	}
	if port == nil || len(port.Families[service.IPv4].Endpoints) == 0 {
		t.Fatalf("%q: no service port with an endpoint: %v", s, snap.Problems)
	}

	for _, form := range []string{"text", "json"} {
		write("log as "+form, func(b *bytes.Buffer) {
			log := zerolog.New(formatLog(form, b, false)).With().Timestamp().Logger()
			for _, p := range snap.Problems {
				log.Warn().Str("object", p.Object).Msg(p.Text)
			}
			log.Error().Err(&os.PathError{Op: "open", Path: s, Err: os.ErrNotExist}).Strs("flags", []string{s}).Msg("what " + s)
		})
		write("findings as "+form, func(b *bytes.Buffer) { readManifest(t, s, zerolog.New(formatLog(form, b, false))) })
	}
	for console, name := range map[bool]string{false: "access log as json", true: "access log for people"} {
		write(name, func(b *bytes.Buffer) {
			l := must.Get(conntrack.OpenLog(conntrack.LogOptions{Writer: b, Console: console, Zone: time.UTC}))(t)
			endpoint := &port.Families[service.IPv4].Endpoints[0]
			l.Write([]conntrack.Record{{
				Client: netip.MustParseAddrPort("10.9.0.1:1"), VIP: netip.MustParseAddrPort("10.96.0.1:80"), Port: port,
				Endpoint: endpoint, Connected: true, Attempts: 2, Failed: []conntrack.Attempt{{Endpoint: endpoint, Error: conntrack.DialRefused}},
			}})
			l.Flush()
		})
	}
	question := explain.Question{Protocol: service.TCP, From: netip.MustParseAddr("10.9.0.1"), To: netip.MustParseAddrPort("10.96.0.1:80")}
	write("explain as text", func(b *bytes.Buffer) { b.WriteString(explain.Ask(table, question, true, nil, nil).Text) })
	write("explain as json", func(b *bytes.Buffer) { _ = explain.WriteJSON(b, explain.Ask(table, question, false, nil, nil)) })
	report := doctor.Report{Chosen: "tproxy", Findings: []doctor.Finding{{Feature: "a", State: doctor.Warning, Found: s, Probed: "b", NeededBy: "c", Remedy: s}}}
	write("doctor as text", func(b *bytes.Buffer) { _ = report.WriteText(b) })
	write("doctor as json", func(b *bytes.Buffer) { _ = report.WriteJSON(b) })
	write("metrics", func(b *bytes.Buffer) {
		connections := conntrack.NewTable(conntrack.Options{})
		connections.Counters(port.Name)
		answer := httptest.NewRecorder()
		metrics := promhttp.HandlerFor(admin.NewRegistry(admin.Sources{Table: connections}), promhttp.HandlerOpts{})
		metrics.ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
		must.Equalf(t, answer.Code, 200, "%q: metrics: %s", s, answer.Body)
		for line := range strings.Lines(answer.Body.String()) {
			if !strings.Contains(line, "go_") { // of which there may be more or fewer
				b.WriteString(line)
			}
		}
	})
	return out
}

// readManifest reads a manifest with a text as its name and in its fields.
func readManifest(t *testing.T, s string, log zerolog.Logger) {
	t.Helper()
	dir := t.TempDir()
	name := strings.NewReplacer("/", "", "\x00", "").Replace(s)
	name = name[:min(len(name), 200)] + ".yaml"
	quoted := must.Get(json.Marshal(s))(t)
	text := "apiVersion: v1\nkind: Service\nmetadata: {name: " + string(quoted) + ", labels: {a: " + string(quoted) + "}, annotations: {" + string(quoted) + ": a}}\n" +
		"spec: {type: " + string(quoted) + ", clusterIP: " + string(quoted) + ", ports: [{port: 80, protocol: " + string(quoted) + "}], " + string(quoted) + "x: 1}\n"
	must.OK(t, os.WriteFile(filepath.Join(dir, "a"+name), []byte(text), 0o600))
	must.OK(t, os.Symlink("nowhere", filepath.Join(dir, "b"+name)))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	must.OK(t, manifests.New(dir, manifests.Options{Logger: log}).Run(ctx, func(service.Change) { cancel() }))
}

// FuzzNoControlCharacterLeaves puts a text into names, annotations, zones, targets,
// addresses and files, and reads every output: nothing in it is a control character,
// changes the direction of text or is invalid UTF-8 but the ends of its lines, and
// there are as many lines as for a harmless text.
func FuzzNoControlCharacterLeaves(f *testing.F) {
	for _, s := range []string{
		"x", "\x1b[2J\x1b]0;title\x07", "a\nb", "\r\n", "\u009b2J", "\u202eevil\u202c", "\u2028", "\x7f", "\xff\xfe", "a | client_fin", "\U000e0001", "\t", `"`, `\`, "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 1000 {
			return
		}
		harmless := outputs(t, "x")
		for kind, text := range outputs(t, s) {
			if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && !strconv.IsPrint(r) }); i >= 0 {
				t.Errorf("%q: %s: %q has the character %q", s, kind, text, text[i:min(i+4, len(text))])
			}
			if !utf8.ValidString(text) {
				t.Errorf("%q: %s: %q is no valid UTF-8", s, kind, text)
			}
			switch {
			case strings.HasPrefix(kind, "log"), strings.HasPrefix(kind, "findings"), s == "" || utf8.RuneCountInString(s) != len(s) && !utf8.ValidString(s):
				// as many lines as there are problems
			case strings.Count(text, "\n") != strings.Count(harmless[kind], "\n"):
				t.Errorf("%q: %s has %d lines, want %d:\n%s", s, kind, strings.Count(text, "\n"), strings.Count(harmless[kind], "\n"), text)
			}
			if strings.HasSuffix(kind, "json") {
				for line := range strings.Lines(text) {
					if kind != "doctor as json" && !json.Valid([]byte(line)) {
						t.Errorf("%q: %s: %s is no JSON", s, kind, line)
					}
				}
			}
		}
	})
}
