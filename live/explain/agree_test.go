package explain

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/race"
	"github.com/sluice-proxy/sluice/test/slowpolicy"
)

var questions = flag.Int("questions", 1_000_000, "how many connections TestAgreesWithSlowPolicy asks about")

// line writes what a slow answer looks like up to the reason, as JSON.
func line(a slowpolicy.Answer) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"verdict":%q,"service":%q,"address":%q,"policy":%q,"candidates":[`, a.Verdict, a.Service, a.Address, a.Policy)
	for i, c := range a.Candidates {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q", c)
	}
	fmt.Fprintf(&b, `],"source":%q,"affinity":%q,"reason":"`, a.Source, a.Affinity)
	return b.String()
}

// TestAgreesWithSlowPolicy asks explain -f about a million random connections
// in random clusters, always the same ones, and wants what a second
// implementation of the rules says.
func TestAgreesWithSlowPolicy(t *testing.T) {
	const perCluster = 2000
	total := race.Fewer(*questions)
	seen := map[string]int{}
	for seed := range uint64(total / perCluster) {
		r := rand.New(rand.NewPCG(4, seed))
		c := slowpolicy.Random(r)
		table := c.Table()
		var in, out bytes.Buffer
		want := make([]slowpolicy.Answer, perCluster)
		for i := range want {
			protocol, client, to := c.Question(r)
			fmt.Fprintf(&in, "{\"protocol\":%q,\"from\":%q,\"to\":%q}\n", strings.ToLower(protocol), client, to)
			want[i] = c.Resolve(protocol, client, to)
		}
		asked := strings.Split(in.String(), "\n")
		if s, err := Batch(by(table), &in, &out); err != nil || s.Failed > 0 {
			t.Fatal(err, s.First)
		}
		for i, got := range strings.Split(strings.TrimSpace(out.String()), "\n") {
			w := want[i]
			_, rules, _ := strings.Cut(got, `"rules":[`)
			if !strings.HasPrefix(got, line(w)) || !strings.HasPrefix(rules, `"`+w.Rule+`"`) || !strings.Contains(rules, w.SourceRule) {
				objects, _ := json.Marshal(c)
				t.Fatalf("seed %d: %s\ngot  %s\nwant %s %s %s\nin %s", seed, asked[i], got, line(w), w.Rule, w.SourceRule, objects)
			}
			seen[w.Verdict+" "+w.Address+" "+w.Rule]++
		}
	}
	for _, outcome := range strings.Split("accept ClusterIP A3.2,accept NodePort A3.3,accept ExternalIP A3.3,accept LoadBalancer A3.3,"+
		"accept NodePort A3.6,accept ExternalIP A3.6,accept LoadBalancer A3.6,refuse ClusterIP A3.4,refuse NodePort A3.4,refuse ExternalIP A3.4,"+
		"refuse LoadBalancer A3.4,drop ClusterIP A3.5,drop NodePort A3.5,drop ExternalIP A3.5,drop LoadBalancer A3.5,drop LoadBalancer A3.10,"+
		"refuse ClusterIP A3.12,drop ClusterIP A3.12,none  A3.13,none  A1.1", ",") {
		if seen[outcome] < total/5000 {
			t.Errorf("only %d cases of %d ended in %q", seen[outcome], total, outcome)
		}
	}
	t.Logf("%v", seen)
}
