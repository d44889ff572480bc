package explain

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/slowpolicy"
)

func emptyTable() *policy.Table {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	svc.Spec.ClusterIP = "10.96.0.10"
	svc.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	return policy.Compile(nil, service.NewStore(service.StoreOptions{}).Apply(service.Change{Services: []*corev1.Service{svc}}), policy.Config{})
}

// by has a table answer.
func by(t *policy.Table) Asker {
	return func(q Question) (*Answer, error) { return Ask(t, q, false, nil, nil), nil }
}

func TestParseQuestion(t *testing.T) {
	for _, tt := range []struct{ protocol, from, to, want string }{
		{"tcp", "10.0.0.1", "10.96.0.10:80", "TCP 10.0.0.1 10.96.0.10:80"},
		{"", "10.0.0.1", "10.96.0.10:80", "TCP 10.0.0.1 10.96.0.10:80"},
		{"UDP", "fd00::1", "[fd00::a]:53", "UDP fd00::1 [fd00::a]:53"},
		{"sctp", "::ffff:10.0.0.1", "[::ffff:10.96.0.10]:80", "SCTP 10.0.0.1 10.96.0.10:80"},
		{"icmp", "10.0.0.1", "10.96.0.10:80", `protocol: "icmp" is not one of tcp, udp, sctp`},
		{"tcp", "", "10.96.0.10:80", "from and to are needed: the client's address, and the address and port that it connects to"},
		{"tcp", "10.0.0.1:1", "10.96.0.10:80", `from: "10.0.0.1:1" is not an IP address such as 10.244.0.5 or fd00::5`},
		{"tcp", "fe80::1%eth0", "[fd00::a]:80", `from: "fe80::1%eth0" is not an IP address such as 10.244.0.5 or fd00::5`},
		{"tcp", "10.0.0.1", "10.96.0.10", `to: "10.96.0.10" is not an IP address and a port such as 10.96.0.10:80 or [fd00::10]:80`},
		{"tcp", "10.0.0.1", "10.96.0.10:0", `to: "10.96.0.10:0" is not an IP address and a port such as 10.96.0.10:80 or [fd00::10]:80`},
		{"tcp", "10.0.0.1", "web:80", `to: "web:80" is not an IP address and a port such as 10.96.0.10:80 or [fd00::10]:80`},
		{"tcp", "fd00::1", "10.96.0.10:80", "from fd00::1 and to 10.96.0.10:80 are not of one address family"},
	} {
		q, err := ParseQuestion(tt.protocol, tt.from, tt.to)
		got := fmt.Sprint(q.Protocol, " ", q.From, " ", q.To)
		if err != nil {
			got = err.Error()
		}
		check.Equalf(t, got, tt.want, "%v", tt)
	}
}

// TestBatch wants an answer for each line that is not empty, in order, and an
// error in its place for one that is no question.
func TestBatch(t *testing.T) {
	const refused = `{"verdict":"refuse","service":"shop/web","address":"ClusterIP","policy":"Cluster","candidates":[],"source":"","affinity":"None","reason":"the service has no endpoints","rules":["A3.4"]}`
	const none = `{"verdict":"none","service":"","address":"","policy":"","candidates":[],"source":"","affinity":"","reason":"no service has this address and port","rules":["A3.13"]}`
	const good = `{"protocol":"tcp","from":"10.0.0.1","to":"10.96.0.10:80"}`
	long := `{"from":"10.0.0.1",` + strings.Repeat(" ", 200_000) + `"to":"10.96.0.10:80"}`
	in := strings.Join([]string{good, "", `{"from":"10.0.0.1","to":"10.9.9.9:80"}` + "\r", "  ", "nonsense", `{"form":"10.0.0.1"}`, good + good, long, `{"from":"<","to":"1.1.1.1:1"}`, good}, "\n")
	bad := "not a question such as {\\\"protocol\\\":\\\"tcp\\\",\\\"from\\\":\\\"10.244.0.5\\\",\\\"to\\\":\\\"10.96.0.10:80\\\"}: "
	want := strings.Join([]string{refused, none,
		`{"error":"line 5: ` + bad + `invalid character 'o' in literal null (expecting 'u')"}`,
		`{"error":"line 6: ` + bad + `unknown field \"form\""}`,
		`{"error":"line 7: ` + bad + `invalid character '{' after top-level value"}`,
		refused,
		`{"error":"line 9: from: \"<\" is not an IP address such as 10.244.0.5 or fd00::5"}`,
		refused, ""}, "\n")
	var out bytes.Buffer
	s, err := Batch(by(emptyTable()), strings.NewReader(in), &out)
	if err != nil || s.Answered != 4 || s.Failed != 4 || s.First == nil || !strings.HasPrefix(s.First.Error(), "line 5: ") {
		t.Errorf("%+v, %v", s, err)
	}
	if out.String() != want {
		t.Errorf("got  %s\nwant %s", out.String(), want)
	}
	if _, err := Batch(by(emptyTable()), strings.NewReader(strings.Repeat("x", 3<<20)), io.Discard); err == nil {
		t.Error("a line without end is no error")
	}
	broken := errors.New("broken")
	if _, err := Batch(by(emptyTable()), io.MultiReader(strings.NewReader(good+"\n"), errorReader{broken}), io.Discard); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

type errorReader struct{ err error }

func (r errorReader) Read([]byte) (int, error) { return 0, r.err }

// TestBatchAnswersAtOnce asks one question after the other through pipes.
func TestBatchAnswersAtOnce(t *testing.T) {
	questions, in := io.Pipe()
	out, answers := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := Batch(by(emptyTable()), questions, answers)
		done <- err
	}()
	time.AfterFunc(10*time.Second, func() { _ = out.CloseWithError(errors.New("no answer")) })
	buffer := make([]byte, 4096)
	for range 3 {
		must.OK(t, must.Err(io.WriteString(in, `{"from":"10.0.0.1","to":"10.96.0.10:80"}`+"\n")))
		if n, err := out.Read(buffer); err != nil || buffer[n-1] != '\n' {
			t.Fatalf("%q, %v", buffer[:n], err)
		}
	}
	_ = in.Close()
	check.OK(t, <-done)
}

// TestEndpointsFollowTheVerdict wants the grounds of each endpoint to fit the
// verdict that they explain, and every rule that is named to have a text.
func TestEndpointsFollowTheVerdict(t *testing.T) {
	reasons := map[string]int{}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(5, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		for range 100 {
			name, client, to := c.Question(r)
			q, err := ParseQuestion(name, client.String(), to.String())
			must.OK(t, err)
			e := table.Explain(q.Protocol, q.From, q.To)
			var candidates []netip.AddrPort
			for _, g := range e.Endpoints() {
				if g.Candidate {
					candidates = append(candidates, g.Endpoint.Addr)
				}
				reasons[g.Reason]++
				if g.Candidate != strings.HasPrefix(g.Reason, "ready") && !strings.HasPrefix(g.Reason, "terminating, but") {
					t.Fatalf("seed %d: %s from %s to %s: candidate %v: %s", seed, name, client, to, g.Candidate, g.Reason)
				}
			}
			var want []netip.AddrPort
			for _, ep := range e.Verdict.Candidates {
				want = append(want, ep.Addr)
			}
			if fmt.Sprint(candidates) != fmt.Sprint(want) {
				t.Fatalf("seed %d: %s from %s to %s: %v, not %v", seed, name, client, to, candidates, want)
			}
			for _, rule := range e.Rules {
				if ruleTexts[rule] == "" {
					t.Fatalf("rule %s has no text", rule)
				}
			}
			if text := Ask(table, q, true, nil, nil).Text; !strings.Contains(text, e.Reason) {
				t.Fatalf("the text does not say %q:\n%s", e.Reason, text)
			}
		}
	}
	if len(reasons) < 12 {
		t.Errorf("only these reasons: %v", reasons)
	}
}

// BenchmarkBatch: the promise is 100,000 answers in a second.
func BenchmarkBatch(b *testing.B) {
	r := rand.New(rand.NewPCG(4, 1))
	c := slowpolicy.Random(r)
	table := c.Table()
	var in bytes.Buffer
	const lines = 10000
	for range lines {
		protocol, client, to := c.Question(r)
		fmt.Fprintf(&in, "{\"protocol\":%q,\"from\":%q,\"to\":%q}\n", strings.ToLower(protocol), client, to)
	}
	b.Run(fmt.Sprintf("lines=%d", lines), func(b *testing.B) {
		for b.Loop() {
			must.OK(b, must.Err(Batch(by(table), bytes.NewReader(in.Bytes()), io.Discard)))
		}
		b.ReportMetric(float64(lines)*float64(b.N)/b.Elapsed().Seconds(), "answers/s")
	})
}

// FuzzLine wants a question that was read to be the same when it is written and
// read again.
func FuzzLine(f *testing.F) {
	for _, line := range []string{
		`{"protocol":"tcp","from":"10.244.0.5","to":"10.96.0.10:80"}`, `{ "from" : "a" , "to" : "b" }`, `{}`, `{"from":"a",}`,
		`{"from":"a"`, `{"from":"a"}}`, `{"from":"\u0061"}`, `{"from":null}`, `{"from":"a","from":"b"}`, `{"FROM":"a"}`, "{\"from\":\"\xff\"}", `{"x":"a"}`,
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		q, err := parseLine([]byte(line))
		if err != nil {
			return
		}
		again, err := parseLine(fmt.Appendf(nil, "{\"protocol\":%q,\"from\":%q,\"to\":%q}", q.Protocol, q.From, q.To))
		if err != nil || again != q {
			t.Errorf("%q: %+v, again %+v, %v", line, q, again, err)
		}
	})
}
