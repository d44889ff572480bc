package balancer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// Algorithm selects one of several endpoints.
type Algorithm uint8

// The algorithms.
const (
	// RoundRobin takes the candidates in turn. It starts at the node's Rank, or
	// at a random one. It is the default.
	RoundRobin Algorithm = iota
	// Random takes each candidate with the same probability.
	Random
)

// algorithmNames are the values of the annotation sluice.dev/balancer. String
// returns the first name of each algorithm.
var algorithmNames = []struct {
	name      string
	algorithm Algorithm
}{
	{"round-robin", RoundRobin},
	{"rr", RoundRobin}, // as IPVS calls it
	{"random", Random},
}

// plannedNames are IPVS schedulers that Sluice does not implement yet. Parse
// answers them with another error than a misspelling.
var plannedNames = []string{
	"least-conn", "lc", "p2c", "source-hash", "sh", "dest-hash", "dh",
	"shortest-expected-delay", "sed", "never-queue", "nq", "maglev", "mh",
}

// String returns a name that Parse accepts.
func (a Algorithm) String() string {
	for _, n := range algorithmNames {
		if n.algorithm == a {
			return n.name
		}
	}
	return "unknown"
}

// Names returns the name of each algorithm, the default first.
func Names() []string {
	var names []string
	for _, n := range algorithmNames {
		if n.name == n.algorithm.String() {
			names = append(names, n.name)
		}
	}
	return names
}

// Parse converts a value of the annotation sluice.dev/balancer. The error lists
// the available names.
func Parse(name string) (Algorithm, error) {
	available := make([]string, 0, len(algorithmNames))
	for _, n := range algorithmNames {
		if n.name == name {
			return n.algorithm, nil
		}
		available = append(available, n.name)
	}
	problem := "unknown"
	if slices.Contains(plannedNames, name) {
		problem = "not available in this version"
	}
	return RoundRobin, fmt.Errorf("balancer %q: %s (available: %s)", name, problem, strings.Join(available, ", "))
}

// annotation names the algorithm of a Service, without the prefix sluice.dev/.
const annotation = "balancer"

// CheckAnnotation returns what is wrong with the value of an annotation of a Service,
// without the prefix sluice.dev/; nil for names that are not known here.
func CheckAnnotation(name, value string) (err error) {
	if name == annotation {
		_, err = Parse(value)
	}
	return err
}

// For returns the options of a service port's balancer, from defaults: its session
// affinity and the algorithm that its annotation names. A name that is not known is
// the problem, and leaves it with the default.
func (o Options) For(port *service.Port) (opts Options, problem error) {
	o.AffinityTimeout, o.port = port.AffinityTimeout, nameKey(port.Name)
	if name, ok := port.Annotations[annotation]; ok {
		algorithm, err := Parse(name)
		if err != nil {
			return o, fmt.Errorf("annotation sluice.dev/%s: %w; it gets %s", annotation, err, o.Algorithm)
		}
		o.Algorithm = algorithm
	}
	return o, nil
}
