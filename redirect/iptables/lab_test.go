package iptables

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// probes are what probeOf has said, by variant: func() error.
var probes sync.Map

// modes runs a test with each variant of the programs, with ipset and without.
// A variant is left out only where its programs are missing or the kernel says
// that it cannot do it. The variants run beside each other; within one, the
// programs of legacy have a lock that is one for all namespaces.
func modes(t *testing.T, test func(t *testing.T, opts Options)) {
	for _, variant := range []Variant{NFT, Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			for _, noSets := range []bool{false, true} {
				name := "ipset"
				if noSets {
					name = "rules"
				}
				t.Run(name, func(t *testing.T) {
					netns.Require(t)
					opts := Options{Variant: variant, NoSets: noSets}
					probe, _ := probes.LoadOrStore(string(variant)+name, sync.OnceValue(func() error { return probeOf(opts) }))
					var missing *redirect.MissingError
					if err := probe.(func() error)(); errors.As(err, &missing) {
						t.Skipf("SKIP-NEEDS: %v", err)
					} else if err != nil {
						t.Fatal(err)
					}
					test(t, opts)
				})
			}
		})
	}
}

var tcp, udp = steering.TCP, steering.UDP

// newOne makes a Redirector inside the node, closed at the end of the test.
func newOne(t testing.TB, node *netns.Host, opts Options) *Redirector {
	t.Helper()
	opts.Routes.NetNS = node.FD()
	r := must.Get(New(opts))(t)
	t.Cleanup(func() { check.OKf(t, r.Close(), "close") })
	return r
}

func apply(t testing.TB, r *Redirector, p redirect.Plan) {
	t.Helper()
	must.OK(t, r.Apply(p))
}

// silence is how long nobody answers who never will, and longest how long an
// answer is waited for that is to come.
const silence, longest = 200 * time.Millisecond, 20 * time.Second

// patienceFor is how long to wait for what is wanted: silence need not be
// listened to for long.
func patienceFor(want string) time.Duration {
	if want == steering.Silence {
		return silence
	}
	return longest
}

// program runs one of iptables' programs, or ipset, in a namespace.
func program(t testing.TB, n *netns.Namespace, name string, args ...string) string {
	t.Helper()
	path := find(name)
	if path == "" {
		t.Fatalf("no program %s", name)
	}
	cmd := n.Command(t, path, args...)
	var problems bytes.Buffer // a warning among them, which is no rule
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, problems.Bytes())
	}
	return string(out)
}

// dump is everything that this mode may touch. Tables of the legacy
// variant are there as soon as somebody looked at them.
func dump(t testing.TB, n *netns.Namespace) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(n.Dump(t))
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, table := range tableNames {
			program(t, n, family+"-legacy", "-t", table, "-S")
			b.WriteString(withoutCounters(program(t, n, family+"-legacy-save", "-t", table)))
		}
	}
	b.WriteString(program(t, n, "ipset", "save"))
	return b.String()
}

func withoutCounters(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		if strings.HasPrefix(line, ":") {
			line, _, _ = strings.Cut(line, "[")
			line += "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

// probeOf tells whether packets can be steered by iptables, by trying everything
// in a scratch network namespace: nil, or a *redirect.MissingError that says
// what is missing.
func probeOf(opts Options) error {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return err
	}
	opts.Routes = opts.Routes.WithDefaults()
	ns, err := openNamespace(opts.Routes.NetNS)
	if err != nil {
		return err
	}
	defer ns.close()
	_, err = choose(ns, opts)
	return err
}
