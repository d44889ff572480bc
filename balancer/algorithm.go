package balancer

import (
	"errors"
	"fmt"
	"math/bits"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// Algorithm selects one of several endpoints.
type Algorithm uint8

// The algorithms. Those that compare connections count those of this node, of both data
// paths.
const (
	// RoundRobin takes the candidates in turn. It starts at the node's Rank, or
	// at a random one. It is the default.
	RoundRobin Algorithm = iota
	// Random takes each candidate with the same probability.
	Random
	// LeastConnections takes the candidate with the fewest connections.
	LeastConnections
	// PowerOfTwo takes the better of two random candidates: by connections, then by the
	// time that they take to answer.
	PowerOfTwo
	// SourceHash takes the same candidate for the same client, while their number stays.
	SourceHash
	// DestinationHash takes the same candidate for the same address of the Service.
	DestinationHash
	// ShortestExpectedDelay takes the lowest (connections + 1) / weight.
	ShortestExpectedDelay
	// NeverQueue takes a candidate without connections, else as ShortestExpectedDelay.
	NeverQueue
	// Maglev is SourceHash that moves few clients when candidates change.
	Maglev
	// WeightedRoundRobin takes the candidates in turn, each as often as its weight says.
	WeightedRoundRobin
	// WeightedLeastConnections takes the lowest connections / weight.
	WeightedLeastConnections
)

// chooser is an algorithm. Its methods are called concurrently.
type chooser interface {
	// prepare derives what the algorithm needs from a list, if it uses views.
	prepare(v *view, c *config, candidates []service.Endpoint)
	// choose returns the index of the candidate for a new connection. It takes no lock
	// and allocates nothing once the list is prepared.
	choose(b *Balancer, c *config, candidates []service.Endpoint, conn Conn, now int64) int
}

// algorithms has for each algorithm its name, the one of IPVS, and the algorithm.
var algorithms = [...]struct {
	name, short string
	chooser
}{
	RoundRobin:               {"round-robin", "rr", roundRobin{}},
	Random:                   {"random", "", random{}},
	LeastConnections:         {"least-connections", "lc", byLoad{}},
	PowerOfTwo:               {"power-of-two", "p2c", powerOfTwo{}},
	SourceHash:               {"source-hash", "sh", byHash{}},
	DestinationHash:          {"destination-hash", "dh", byHash{destination: true}},
	ShortestExpectedDelay:    {"shortest-expected-delay", "sed", byLoad{extra: 1, weighted: true}},
	NeverQueue:               {"never-queue", "nq", byLoad{extra: 1, weighted: true, idle: true}},
	Maglev:                   {"maglev", "mh", maglev{}},
	WeightedRoundRobin:       {"weighted-round-robin", "wrr", weightedRoundRobin{}},
	WeightedLeastConnections: {"weighted-least-connections", "wlc", byLoad{weighted: true}},
}

// roundRobin and random need nothing of a list.
type (
	roundRobin struct{}
	random     struct{}
)

func (roundRobin) prepare(*view, *config, []service.Endpoint) {}
func (random) prepare(*view, *config, []service.Endpoint)     {}

func (roundRobin) number(b *Balancer, _ *config, _ Conn) uint64 { return b.next() }
func (random) number(b *Balancer, _ *config, _ Conn) uint64     { return b.next() }

func (roundRobin) named(_ *Balancer, _ *config, candidates []service.Endpoint, number uint64) int {
	return nth(number, len(candidates))
}

func (random) named(_ *Balancer, _ *config, candidates []service.Endpoint, number uint64) int {
	return nth(number, len(candidates))
}

// nth maps a number to one from 0 to n-1.
func nth(number uint64, n int) int {
	hi, _ := bits.Mul64(number, uint64(n))
	return int(hi)
}

func (roundRobin) choose(b *Balancer, c *config, candidates []service.Endpoint, _ Conn, _ int64) int {
	return b.turn(c, candidates)
}

func (random) choose(b *Balancer, _ *config, candidates []service.Endpoint, _ Conn, _ int64) int {
	return b.below(len(candidates))
}

// String returns the algorithm's name, which Parse accepts.
func (a Algorithm) String() string { return algorithms[a].name }

// WeightOf returns the weight of an endpoint, by which the algorithm spreads connections: 1 or
// more, and 1 for all if the algorithm does not know weights.
func (a Algorithm) WeightOf(e *service.Endpoint) int {
	switch a {
	case ShortestExpectedDelay, NeverQueue, WeightedRoundRobin, WeightedLeastConnections:
		return max(int(e.Weight), 1)
	default:
		return 1
	}
}

// SpreadsClients reports whether clients of one destination get different endpoints. Where they all
// get the same, there is nothing to even out.
func (a Algorithm) SpreadsClients() bool { return a != DestinationHash }

// Names returns the name of each algorithm, the default first.
func Names() []string {
	var names []string
	for i := range algorithms {
		names = append(names, algorithms[i].name)
	}
	return names
}

// Parse converts the name of an algorithm, or the name that IPVS has for it. The error
// lists the names.
func Parse(name string) (Algorithm, error) {
	var available []string
	for i, a := range algorithms {
		if name != "" && (name == a.name || name == a.short) {
			return Algorithm(i), nil
		}
		if available = append(available, a.name); a.short != "" {
			available = append(available, a.short)
		}
	}
	return RoundRobin, fmt.Errorf("balancer %q: unknown (available: %s)", name, strings.Join(available, ", "))
}

// Annotations of a Service, without the prefix sluice.dev/.
const (
	annotation      = "balancer"
	hashAnnotation  = "balancer-hash"
	ejectAnnotation = "eject-after"
	dialAnnotation  = "dial-timeouts"
)

// parseHash reports whether the client's port counts in hashes.
func parseHash(value string) (port bool, err error) {
	switch value {
	case "client":
		return false, nil
	case "client-port":
		return true, nil
	}
	return false, fmt.Errorf("%s %q: unknown (available: client, client-port)", hashAnnotation, value)
}

// CheckAnnotation returns what is wrong with the value of an annotation of a Service,
// without the prefix sluice.dev/; nil for names that are not known here.
func CheckAnnotation(name, value string) (err error) {
	switch name {
	case annotation, service.Foreign[0], service.Foreign[1]:
		_, err = Parse(value)
	case hashAnnotation:
		_, err = parseHash(value)
	case dialAnnotation:
		_, err = parseTimeouts(value)
	case ejectAnnotation:
		_, err = parseEjection(value)
	}
	return err
}

// For returns the options of a service port's balancer, from defaults: its session
// affinity, and what its annotations say. A value that is not known is the problem, and
// leaves it with the default.
func (o Options) For(port *service.Port) (opts Options, problem error) {
	o.AffinityTimeout, o.Port = port.AffinityTimeout, port
	name, key := port.Annotations[annotation], "sluice.dev/"+annotation
	for _, k := range service.Foreign { // sluice.dev/balancer comes before them
		if name == "" {
			name, key = port.Annotations[k], k
		}
	}
	if name != "" {
		if algorithm, err := Parse(name); err == nil {
			o.Algorithm = algorithm
		} else {
			problem = fmt.Errorf("annotation %s: %w; it gets %s", key, err, o.Algorithm)
		}
	}
	if value, ok := port.Annotations[hashAnnotation]; ok {
		var err error
		if o.HashPort, err = parseHash(value); err != nil {
			problem = errors.Join(problem, fmt.Errorf("annotation sluice.dev/%w; it gets client", err))
		}
	}
	if port.Rebalance > 0 && !o.Algorithm.SpreadsClients() {
		problem = errors.Join(problem, fmt.Errorf("annotation sluice.dev/rebalance: %s gives all clients the same endpoint; no connection is closed", o.Algorithm))
	}
	if value, ok := port.Annotations[dialAnnotation]; ok {
		if timeouts, err := parseTimeouts(value); err == nil {
			o.Plan.Timeouts = timeouts
		} else {
			problem = errors.Join(problem, fmt.Errorf("annotation sluice.dev/%w; it gets the default", err))
		}
	}
	if value, ok := port.Annotations[ejectAnnotation]; ok {
		var err error
		if o.Ejection, err = parseEjection(value); err != nil {
			problem = errors.Join(problem, fmt.Errorf("annotation sluice.dev/%w; nothing is ejected", err))
		}
	}
	return o, problem
}
