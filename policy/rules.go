package policy

// Rule is the rule that decided. String returns its ID in the documentation.
type Rule uint8

// The rules that decide about a connection. The zero value is no rule.
const (
	RuleNotOurs          Rule = iota + 1 // A3.13: no service has this address and port
	RuleInternalPolicy                   // A3.2: a cluster IP, by the internal traffic policy
	RuleExternalPolicy                   // A3.3: any other address, by the external traffic policy
	RuleNoEndpoints                      // A3.4: no endpoints on any node
	RuleNoLocalEndpoints                 // A3.5: endpoints, but none on this node
	RuleShortCircuit                     // A3.6: a local pod or the node itself bypasses policy Local
	RuleMasquerade                       // A3.8: the endpoint sees the node
	RulePreserve                         // A3.9: the endpoint sees the client
	RuleSourceRanges                     // A3.10: the client is outside the source ranges
	RuleOtherProxy                       // A1.1: a cluster IP of a Service that another proxy serves
	RuleUnknownPort                      // A3.12: a port that the cluster IP's Service lacks, or an unused cluster IP
)

var ruleNames = [...]string{
	RuleNotOurs:          "A3.13",
	RuleInternalPolicy:   "A3.2",
	RuleExternalPolicy:   "A3.3",
	RuleNoEndpoints:      "A3.4",
	RuleNoLocalEndpoints: "A3.5",
	RuleShortCircuit:     "A3.6",
	RuleMasquerade:       "A3.8",
	RulePreserve:         "A3.9",
	RuleSourceRanges:     "A3.10",
	RuleOtherProxy:       "A1.1",
	RuleUnknownPort:      "A3.12",
}

// String returns the rule's ID in the documentation, such as "A3.4".
func (r Rule) String() string {
	if int(r) < len(ruleNames) {
		return ruleNames[r]
	}
	return "unknown"
}
