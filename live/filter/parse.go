package filter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/nearest"
)

// operator compares a field with a value.
type operator string

// The operators, each before those that begin it.
var operators = []operator{"!=", "<=", ">=", "=", "<", ">"}

// orders reports whether the operator needs an order of values.
func (o operator) orders() bool { return o[0] == '<' || o[0] == '>' }

// Parse parses a filter. The error is an *Error.
func Parse(text string) (*Filter, error) { return parse(&parser{text: text}) }

// ParseForRecords is Parse for a filter that selects records of connections that end, or
// what is measured of them: no transport can be asked any more, unless records say what it said.
func ParseForRecords(text string) (*Filter, error) { return parse(&parser{text: text, records: true}) }

func parse(p *parser) (*Filter, error) {
	text := p.text
	if len(text) > MaxLength {
		return nil, &Error{Filter: text[:32] + "...", At: 0, End: 35, Message: fmt.Sprintf("the filter is longer than %d bytes", MaxLength)}
	}
	f := &Filter{text: strings.Trim(text, blanks)}
	for p.skipBlanks(); p.at < len(p.text); p.skipBlanks() {
		t, err := p.term()
		if err != nil {
			return nil, err
		}
		f.terms = append(f.terms, t)
	}
	f.open, f.clients = p.open, p.clients
	return f, nil
}

// parser reads a text from left to right.
type parser struct {
	text    string
	at      int
	values  int
	records bool // the filter is for records
	open    bool // a field is of open connections
	clients *clients
}

// blanks separate terms.
const blanks = " \t\n\r"

func (p *parser) skipBlanks() {
	p.at = len(p.text) - len(strings.TrimLeft(p.text[p.at:], blanks))
}

func (p *parser) fail(from, to int, format string, args ...any) error {
	return &Error{Filter: p.text, At: from, End: to, Message: fmt.Sprintf(format, args...)}
}

// cutOperator divides a term. The operator is empty if there is none.
func cutOperator(term string) (name string, op operator, value string) {
	at := strings.IndexAny(term, "!<>=")
	if at < 0 {
		return "", "", term
	}
	for _, o := range operators {
		if strings.HasPrefix(term[at:], string(o)) {
			return term[:at], o, term[at+len(o):]
		}
	}
	return "", "", term
}

// find returns where the first of some bytes is between two places, outside of quotes;
// the second place if there is none. quote is where a quote begins that has no end, or -1.
func (p *parser) find(some string, from, to int) (at, quote int) {
	quote = -1
	for at = from; at < to; at++ {
		switch c := p.text[at]; {
		case c == '"' && quote < 0:
			quote = at
		case c == '"':
			quote = -1
		case quote < 0 && strings.IndexByte(some, c) >= 0:
			return at, quote
		}
	}
	return to, quote
}

// term reads one term.
func (p *parser) term() (term, error) {
	start := p.at
	end, quote := p.find(blanks, start, len(p.text))
	if quote >= 0 {
		return term{}, p.fail(quote, len(p.text), "this quote has no end")
	}
	p.at = end
	name, op, _ := cutOperator(p.text[start:end])
	if op == "" {
		return p.search(start, end)
	}
	if name == "" {
		return term{}, p.fail(start, start+len(op), "a field must stand before %s, such as service%s", op, op)
	}
	field, ok := fields[name]
	if !ok {
		return term{}, p.unknown(name, start)
	}
	if p.open = p.open || field.open; field.open && p.records {
		return term{}, p.fail(start, start+len(name), "%s is known of open connections alone: sluice conns and sluice close take it, and with sluice run --record-tcp sluice tap and sluice log", name)
	}
	from := start + len(name) + len(op)
	if from == end {
		return term{}, p.fail(start, end, "%s%s needs a value, such as %s", name, op, field.usage())
	}
	if op.orders() && !field.order {
		return term{}, p.fail(start+len(name), from, "%s has no order: use = or !=", name)
	}
	t := term{negate: op == "!=", configured: field.configured}
	for from <= end {
		to, _ := p.find(",", from, end)
		holds, err := p.value(field, op, from, to)
		if err != nil {
			return term{}, err
		}
		t.holds = append(t.holds, holds)
		from = to + 1
	}
	return t, nil
}

// unknown is the error about a field that does not exist.
func (p *parser) unknown(name string, at int) error {
	hint := "; fields are " + strings.Join(Fields(), ", ")
	if near := nearest.Name(name, min(3, len(name)/2+1), maps.Keys(fields)); near != "" {
		hint = "; did you mean " + near + "?"
	}
	return p.fail(at, at+len(name), "there is no field %q%s", name, hint)
}

// search is a term without an operator.
func (p *parser) search(from, to int) (term, error) {
	text, err := p.unquote(from, to)
	if err != nil {
		return term{}, err
	}
	if text == "" { // sluice close would end all connections
		return term{}, p.fail(from, to, "this word is empty; id>0 selects all")
	}
	if p.values++; p.values > maxValues {
		return term{}, p.tooMany(from, to)
	}
	text = strings.ToLower(text)
	return term{configured: true, holds: []func(*conntrack.Record) bool{func(r *conntrack.Record) bool { return mentions(r, text) }}}, nil
}

func (p *parser) tooMany(from, to int) error {
	return p.fail(from, to, "the filter has more than %d values", maxValues)
}

// unquote returns a value without its quotes.
func (p *parser) unquote(from, to int) (string, error) {
	v := p.text[from:to]
	if !strings.Contains(v, `"`) {
		// service==cart is a mistake, and no name has such a byte.
		if at := strings.IndexAny(v, "!<>="); at >= 0 {
			return "", p.fail(from+at, from+at+1, "operators are =, !=, <, <=, > and >=, between a field and a value; a value with %c is in quotes", v[at])
		}
		return v, nil
	}
	if len(v) < 2 || v[0] != '"' || v[len(v)-1] != '"' || strings.Count(v, `"`) != 2 {
		return "", p.fail(from, to, `quotes must be around the whole value, such as pod="a b"`)
	}
	return v[1 : len(v)-1], nil
}

// value compiles one value of a term.
func (p *parser) value(f *field, op operator, from, to int) (func(*conntrack.Record) bool, error) {
	text, err := p.unquote(from, to)
	if err != nil {
		return nil, err
	}
	if text == "" {
		return nil, p.fail(from, max(to, from), "%s needs a value here, such as %s", f.name, f.usage())
	}
	if p.values++; p.values > maxValues {
		return nil, p.tooMany(from, to)
	}
	compile := f.compile
	if compile == nil {
		p.clients = cmp.Or(p.clients, new(clients))
		compile = p.clients.compile
	}
	holds, err := compile(op, text)
	if err != nil {
		return nil, p.fail(from, to, "%s", err.Error())
	}
	return holds, nil
}

// Fields returns the names of all fields, sorted.
func Fields() []string { return slices.Sorted(maps.Keys(fields)) }
