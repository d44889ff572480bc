package sctp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// name answers each association with a text, which names the endpoint.
func name(text string) func(*peer) {
	return func(p *peer) {
		defer sys.CloseInOrder(p.fd)
		if p.send(note{text: []byte(text)}) == nil {
			_, _ = p.receive() // until the client ends
		}
	}
}

// silence is how long a client waits that is to hear nothing.
const silence = 1500 * time.Millisecond

// ask returns the endpoint that a client reaches, "refused" or, after some time, "silence".
func ask(from *netns.Host, local, to string, patience time.Duration) string {
	a, _ := netip.ParseAddr(local)
	p, err := dialIn(from.Namespace, to, a, patience)
	switch {
	case errors.Is(err, sys.ECONNREFUSED):
		return "refused"
	case errors.Is(err, sys.ETIMEDOUT):
		return "silence"
	case err != nil:
		return err.Error()
	}
	defer p.abort()
	n, err := p.receive()
	if errors.Is(err, sys.ECONNRESET) {
		return "refused" // after the handshake
	}
	if err != nil {
		return err.Error()
	}
	return string(n.text)
}

// Each kind of address, policy and client gets what explain says (A3).
func TestCases(t *testing.T) {
	c := netns.NewCluster(t)
	for _, h := range []*netns.Host{c.Pods[0], c.Remote[0]} {
		for _, a := range []netip.Addr{h.IPv4, h.IPv6} {
			serve(t, h.Namespace, netip.AddrPortFrom(a, targetPort).String(), options(), name(h.Name()))
		}
	}
	here, there := c.Pods[0].IPv4.String()+" node", c.Remote[0].IPv4.String()+" node2"
	text := manifest(
		svc{name: "both", ip: "10.96.0.10", spec: "type: NodePort\nexternalIPs: [\"203.0.113.10\"]\n# nodePort 30001\n", endpoints: []string{here, there}},
		svc{name: "six", ip: "fd00:96::10", spec: "type: NodePort\nexternalIPs: [\"2001:db8:113::10\"]\n# nodePort 30007\n", endpoints: []string{c.Remote[0].IPv6.String() + " node2"}},
		svc{name: "empty", ip: "10.96.0.11", spec: "type: NodePort\nexternalIPs: [\"198.51.100.10\"]\n# nodePort 30002\n"},
		svc{name: "inner", ip: "10.96.0.12", spec: "internalTrafficPolicy: Local\n", endpoints: []string{here, there}},
		svc{name: "away", ip: "10.96.0.13", spec: "internalTrafficPolicy: Local\n", endpoints: []string{there}},
		svc{name: "outer", ip: "10.96.0.14", spec: "type: NodePort\nexternalTrafficPolicy: Local\n# nodePort 30003\n", endpoints: []string{here, there}},
		svc{name: "gone", ip: "10.96.0.15", spec: "type: NodePort\nexternalTrafficPolicy: Local\n# nodePort 30004\n", endpoints: []string{there}},
		svc{name: "outer6", ip: "fd00:96::14", spec: "type: NodePort\nexternalTrafficPolicy: Local\n# nodePort 30008\n", endpoints: []string{c.Pods[0].IPv6.String() + " node", c.Remote[0].IPv6.String() + " node2"}},
		svc{name: "ranges", ip: "10.96.0.16", spec: "type: LoadBalancer\nloadBalancerSourceRanges: [\"10.1.0.2/32\"]\n# nodePort 30005\n", endpoints: []string{there}},
	)
	text += `---
apiVersion: v1
kind: Service
metadata: {name: balanced, namespace: default}
spec:
  type: LoadBalancer
  clusterIP: "10.96.0.17"
  loadBalancerSourceRanges: ["10.1.0.2/32", "10.244.1.0/24"]
  ports: [{name: s, port: 3868, targetPort: 13868, protocol: SCTP, nodePort: 30006}]
status: {loadBalancer: {ingress: [{ip: "198.51.100.30"}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: balanced, namespace: default, labels: {kubernetes.io/service-name: balanced}}
addressType: IPv4
ports: [{name: s, port: 13868, protocol: SCTP}]
endpoints: [{addresses: ["` + c.Remote[0].IPv4.String() + `"], nodeName: node2, conditions: {ready: true}}]
`
	flags := []string{"--cluster-cidr", "10.244.0.0/16,fd00:244::/32"}
	p := startProxy(t, c.Node.Namespace, text, flags...)
	var questions strings.Builder
	var heard []string
	for _, q := range []struct {
		from  *netns.Host
		local string // of several addresses
		to    string
		want  []string
	}{
		{c.Pods[0], "", "10.96.0.10:3868", []string{"pod-1", "pod-3"}},
		{c.Node, "", "10.96.0.10:3868", []string{"pod-1", "pod-3"}},
		{c.Outside, "10.1.0.2", "10.96.0.10:3868", []string{"pod-1", "pod-3"}},
		{c.Pods[0], "", "[fd00:96::10]:3868", []string{"pod-3"}},
		{c.Outside, "fd00:1::2", "[2001:db8:113::10]:3868", []string{"pod-3"}},
		{c.Outside, "fd00:1::2", "[fd00:1::1]:30007", []string{"pod-3"}},
		{c.Outside, "fd00:1::2", "[fd00:1::1]:30008", []string{"pod-1"}}, // external policy Local
		{c.Outside, "10.1.0.2", "203.0.113.10:3868", []string{"pod-1", "pod-3"}},
		{c.Pods[0], "", "203.0.113.10:3868", []string{"pod-1", "pod-3"}},
		{c.Outside, "10.1.0.2", "10.1.0.1:30001", []string{"pod-1", "pod-3"}},
		{c.Pods[0], "", "10.96.0.11:3868", []string{"refused"}},        // A3.4
		{c.Outside, "10.1.0.2", "10.1.0.1:30002", []string{"refused"}}, // A3.4
		{c.Outside, "10.1.0.2", "198.51.100.10:3868", []string{"refused"}},
		{c.Pods[0], "", "10.96.0.10:3869", []string{"refused"}},        // A3.12
		{c.Pods[0], "", "10.96.0.12:3868", []string{"pod-1"}},          // internal policy Local
		{c.Pods[0], "", "10.96.0.13:3868", []string{"silence"}},        // A3.5
		{c.Outside, "10.1.0.2", "10.1.0.1:30003", []string{"pod-1"}},   // external policy Local
		{c.Outside, "10.1.0.2", "10.1.0.1:30004", []string{"silence"}}, // A3.5
		{c.Outside, "10.1.0.2", "198.51.100.30:3868", []string{"pod-3"}},
		{c.Outside, "10.1.0.3", "198.51.100.30:3868", []string{"silence"}}, // A3.10
		{c.Pods[1], "", "198.51.100.30:3868", []string{"pod-3"}},
		{c.Outside, "10.1.0.3", "10.1.0.1:30006", []string{"pod-3"}}, // ranges are for load balancer IPs
	} {
		patience := patience
		if slices.Contains(q.want, "silence") {
			patience = silence
		}
		got := ask(q.from, q.local, q.to, patience)
		if !slices.Contains(q.want, got) {
			t.Errorf("from %s %s to %s: %q, want one of %q", q.from.Name(), q.local, q.to, got, q.want)
		}
		from := q.local
		if from == "" {
			from = q.from.IPv4.String()
			if to, _ := netip.ParseAddrPort(q.to); to.Addr().Is6() {
				from = q.from.IPv6.String()
			}
		}
		fmt.Fprintf(&questions, "{\"protocol\":\"sctp\",\"from\":%q,\"to\":%q}\n", from, q.to)
		heard = append(heard, got)
	}
	// One process answers all: in a guest, each start costs a quarter of a second.
	command := exec.Command(os.Getenv(programEnv), append([]string{"explain", "--manifests", p.dir, "--hostname-override", "node",
		"--node-ip", "10.1.0.1,fd00:1::1", "--service-cidr", "10.96.0.0/16,fd00:96::/112", "-f", "-"}, flags...)...)
	command.Stdin = strings.NewReader(questions.String())
	out, err := command.Output()
	must.OKf(t, err, "explain")
	answers := json.NewDecoder(bytes.NewReader(out))
	asked := strings.Split(questions.String(), "\n")
	for i, got := range heard {
		var a answer
		must.OKf(t, answers.Decode(&a), "answer to %s", asked[i])
		if said := a.outcomes(t); !slices.Contains(said, got) {
			t.Errorf("%s: %q, but explain says %q", asked[i], got, said)
		}
	}
}

// answer is what "sluice explain" says.
type answer struct {
	Verdict    string
	Candidates []string
}

// outcomes returns what the answer allows, in the words of ask.
func (a answer) outcomes(t *testing.T) (want []string) {
	t.Helper()
	switch a.Verdict {
	case "refuse":
		return []string{"refused"}
	case "drop":
		return []string{"silence"}
	}
	for _, e := range a.Candidates {
		ap := must.Get(netip.ParseAddrPort(e))(t)
		name := "pod-1"
		if a := ap.Addr().String(); a == "10.244.2.2" || a == "fd00:244:2::2" {
			name = "pod-3"
		}
		want = append(want, name)
	}
	return want
}

// Session affinity keeps a client at its endpoint.
func TestCasesAffinity(t *testing.T) {
	lab := netns.NewLab(t, 3)
	var endpoints []string
	for _, b := range lab.Backends {
		serve(t, b.Namespace, at(b), options(), name(b.Name()))
		endpoints = append(endpoints, b.IPv4.String())
	}
	startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "sticky", ip: "10.96.0.10", spec: "sessionAffinity: ClientIP\n", endpoints: endpoints},
		svc{name: "round", ip: "10.96.0.11", endpoints: endpoints}))
	first := ask(lab.Client, "", "10.96.0.10:3868", patience)
	seen := make(map[string]int)
	for range 9 {
		check.Equalf(t, ask(lab.Client, "", "10.96.0.10:3868", patience), first, "who serves the client again")
		seen[ask(lab.Client, "", "10.96.0.11:3868", patience)]++
	}
	check.Equalf(t, len(seen), 3, "without affinity: %v", seen)
}

// The limit of a Service holds for its associations; beyond it they get an ABORT.
func TestProxyKeepsLimits(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}), "--max-connections-per-service", "3")
	var open []*peer
	for range 3 {
		a := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
		talk(t, a, "hello")
		open = append(open, a)
	}
	a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", options())
	if err == nil {
		check.ErrorIsf(t, must.Err(a.receive()), sys.ECONNRESET, "beyond the limit")
	}
	if r := p.ended(1); r[0].End != "limit" {
		t.Errorf("%+v", r)
	}
	talk(t, open[0], "others live on")
	open[0].abort()
	p.ended(1)
	wait.For(t, "room", patience, func() error {
		a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", options())
		if err != nil {
			return err
		}
		defer a.abort()
		_ = a.send(note{text: []byte("x")})
		_, err = a.receive()
		return err
	})
}
