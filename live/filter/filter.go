// Package filter is the language that selects connections: a list of terms, all of
// which must hold.
//
//	service=shop/cart endpoint=10.0.0.7 client=10.1.0.0/16 state=open attempts>1 bytes>1MB
//
// A term is a field, an operator (=, !=, <, <=, >, >=) and a value, or several
// values separated by commas, of which one must hold. Numbers, sizes, durations and
// ports take ranges (attempts=2..5); names take prefixes (pod=shop/cart-*);
// addresses take prefixes (client=10.1.0.0/16) and ports (endpoint=10.0.0.7:8080,
// vip=:443). A word without an operator is searched for in names and addresses.
//
// A connection without a value for a field (an endpoint that was never tried, the
// end of an open connection) matches only !=.
//
// [Parse] bounds the time that [Filter.Match] takes; Match allocates nothing.
package filter

import (
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// MaxLength bounds the text of a filter, in bytes.
	MaxLength = 4096
	// maxValues bounds the values of all terms together.
	maxValues = 256
)

// Filter selects records. The zero value selects all. It never changes, and is safe
// for concurrent use.
type Filter struct {
	text  string
	terms []term
	open  bool // a field is one that only the transport of an open connection says
	// clients names clients' pods; nil if no term asks for them.
	clients *clients
}

// term is one condition.
type term struct {
	holds  []func(*conntrack.Record) bool // one of them must hold
	negate bool
	// configured is set if a Service and one of its endpoints decide.
	configured bool
}

// Match reports whether a record matches all terms.
func (f *Filter) Match(r *conntrack.Record) bool {
	for i := range f.terms {
		if !f.terms[i].match(r) {
			return false
		}
	}
	return true
}

func (t *term) match(r *conntrack.Record) bool {
	for _, holds := range t.holds {
		if holds(r) {
			return !t.negate
		}
	}
	return t.negate
}

// NeedsTransport reports whether Match looks at Record.Transport.
func (f *Filter) NeedsTransport() bool { return f.open }

// NamesClients reports whether Match asks for the pods of clients.
func (f *Filter) NamesClients() bool { return f.clients != nil }

// NameClients tells the filter how to find the pod of a client: at returns its name, or the
// zero one. Call it before the first Match; without it, no client has a pod.
func (f *Filter) NameClients(at func(netip.Addr) service.Name) {
	if f.clients != nil {
		f.clients.at = at
	}
}

// IsEmpty reports whether the filter selects all.
func (f *Filter) IsEmpty() bool { return len(f.terms) == 0 }

// Configured returns the terms that a Service and one of its endpoints decide, such as
// service, vip and pod, but not client or bytes. all reports whether these are all
// terms. It is for records that stand for what is configured.
func (f *Filter) Configured() (part *Filter, all bool) {
	part = &Filter{text: f.text}
	for _, t := range f.terms {
		if t.configured {
			part.terms = append(part.terms, t)
		}
	}
	return part, len(part.terms) == len(f.terms)
}

// String returns the text that the filter was parsed from, without blanks around it.
func (f *Filter) String() string { return f.text }

// Join returns the text of a filter that was given in several arguments, as a shell
// passes them: an argument with a blank inside its value is quoted again.
func Join(args []string) string {
	quoted := make([]string, len(args))
	for i, arg := range args {
		quoted[i] = arg
		name, _, value := cutOperator(arg)
		if strings.ContainsAny(value, blanks) && !strings.ContainsAny(value, `"=<>!`) && name != "" {
			quoted[i] = arg[:len(arg)-len(value)] + `"` + value + `"`
		}
	}
	return strings.Join(quoted, " ")
}
