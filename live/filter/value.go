package filter

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// match is a compiled value.
type match = func(*conntrack.Record) bool

// pattern is a name, or the beginning of one.
type pattern struct {
	text   string
	prefix bool
}

func newPattern(text string) (pattern, error) {
	before, ok := strings.CutSuffix(text, "*")
	if strings.Contains(before, "*") {
		return pattern{}, errors.New("* may only be at the end of a name")
	}
	return pattern{before, ok}, nil
}

func (p pattern) match(s string) bool {
	if p.prefix {
		return strings.HasPrefix(s, p.text)
	}
	return s == p.text
}

// names compiles the value of a field that is one name.
func names(get func(*conntrack.Record) string) compiler {
	return func(_ operator, text string) (match, error) {
		p, err := newPattern(text)
		return func(r *conntrack.Record) bool {
			name := get(r)
			return name != "" && p.match(name)
		}, err
	}
}

// qualified compiles namespace/name, or name alone.
func qualified(get func(*conntrack.Record) *service.Name) compiler {
	return func(_ operator, text string) (match, error) {
		holds, err := namePattern(text)
		return func(r *conntrack.Record) bool {
			n := get(r)
			return n.Name != "" && holds(n)
		}, err
	}
}

// clients finds the pods of clients.
type clients struct {
	at func(netip.Addr) service.Name // nil: nobody knows
}

// compile compiles the client's pod.
func (c *clients) compile(_ operator, text string) (match, error) {
	holds, err := namePattern(text)
	return func(r *conntrack.Record) bool {
		if c.at == nil || r.ClientNode() != "" {
			return false
		}
		pod := c.at(r.Client.Addr())
		return pod.Name != "" && holds(&pod)
	}, err
}

func namePattern(text string) (func(*service.Name) bool, error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		p, err := newPattern(text)
		return func(n *service.Name) bool { return p.match(n.Name) }, err
	}
	in, err1 := newPattern(namespace)
	p, err2 := newPattern(name)
	return func(n *service.Name) bool { return in.match(n.Namespace) && p.match(n.Name) }, cmp.Or(err1, err2)
}

// services compiles namespace/name:port, without what is not given.
func services(_ operator, text string) (match, error) {
	name, port, withPort := strings.Cut(text, ":")
	if name == "" {
		return nil, errors.New("a service is namespace/name or namespace/name:port, such as shop/cart:http")
	}
	holds, err1 := namePattern(name)
	p, err2 := newPattern(port)
	return func(r *conntrack.Record) bool {
		return r.Port != nil && holds(&r.Port.Name.Name) && (!withPort || p.match(r.Port.Name.Port))
	}, cmp.Or(err1, err2)
}

// enumerated compiles one of some values.
func enumerated(get func(*conntrack.Record) string, values []string) compiler {
	return func(_ operator, text string) (match, error) {
		want, err := oneOf(values, text)
		return func(r *conntrack.Record) bool { return get(r) == want }, err
	}
}

// oneOf returns the value that a text means.
func oneOf(values []string, text string) (string, error) {
	if i := slices.IndexFunc(values, func(v string) bool { return strings.EqualFold(v, text) }); i >= 0 {
		return values[i], nil
	}
	hint := ""
	if near := nearest.Name(text, 3, slices.Values(values)); near != "" {
		hint = "; did you mean " + near + "?"
	}
	return "", fmt.Errorf("%q is not one of %s%s", text, strings.Join(values, ", "), hint)
}

// failedWith compiles an error that one of the attempts failed with.
func failedWith(_ operator, text string) (match, error) {
	want, err := oneOf(texts(conntrack.DialErrors()...), text)
	return func(r *conntrack.Record) bool {
		return slices.ContainsFunc(r.Failed, func(a conntrack.Attempt) bool { return a.Error.String() == want })
	}, err
}

// place is an address, a range of addresses, a port, a range of ports, or both.
type place struct {
	prefix netip.Prefix // invalid: any
	ports  [2]uint16
}

func (p *place) match(a netip.AddrPort) bool {
	if !a.IsValid() {
		return false
	}
	return (!p.prefix.IsValid() || p.prefix.Contains(a.Addr())) && p.ports[0] <= a.Port() && a.Port() <= p.ports[1]
}

var errPlace = errors.New("this is not an address such as 10.0.0.7, 10.0.0.7:80, 10.1.0.0/16, [fd00::7]:80, :443 or :8000-8999")

func parsePlace(text string) (place, error) {
	p := place{ports: [2]uint16{0, math.MaxUint16}}
	addr := text
	if i := strings.LastIndexByte(text, ':'); i == 0 || i > 0 && (text[i-1] == ']' || strings.Count(text, ":") == 1) {
		addr = strings.TrimSuffix(strings.TrimPrefix(text[:i], "["), "]")
		first, last, isRange := strings.Cut(text[i+1:], "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || from > to {
			return p, fmt.Errorf("%q is not a port or a range of ports such as 8000-8999", text[i+1:])
		}
		p.ports = [2]uint16{uint16(from), uint16(to)}
		if addr == "" && i == 0 {
			return p, nil
		}
	}
	addr = strings.TrimSuffix(strings.TrimPrefix(addr, "["), "]")
	if prefix, err := netip.ParsePrefix(addr); err == nil {
		// Addresses of records are never mapped ones.
		if a := prefix.Addr(); a.Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(a.Unmap(), prefix.Bits()-96)
		}
		p.prefix = prefix.Masked()
		return p, nil
	}
	a, err := netip.ParseAddr(addr)
	if err != nil || a.Zone() != "" {
		return p, errPlace
	}
	a = a.Unmap()
	p.prefix = netip.PrefixFrom(a, a.BitLen())
	return p, nil
}

// places compiles the value of a field that is an address and port.
func places(get func(*conntrack.Record) netip.AddrPort) compiler {
	return func(_ operator, text string) (match, error) {
		p, err := parsePlace(text)
		return func(r *conntrack.Record) bool { return p.match(get(r)) }, err
	}
}

// tried compiles an endpoint that answered or failed.
func tried(_ operator, text string) (match, error) {
	p, err := parsePlace(text)
	return func(r *conntrack.Record) bool {
		return p.match(endpointOf(r).Addr) || slices.ContainsFunc(r.Failed, func(a conntrack.Attempt) bool {
			return a.Endpoint != nil && p.match(a.Endpoint.Addr)
		})
	}, err
}

// numbers compiles a number, a range of them, or a bound. get returns false if there
// is no value.
func numbers(get func(*conntrack.Record) (int64, bool), parse func(string) (int64, error)) compiler {
	return func(op operator, text string) (match, error) {
		low, high, isRange := strings.Cut(text, "..")
		if isRange && op.orders() {
			return nil, fmt.Errorf("%s takes one value, not a range", op)
		}
		if !isRange {
			high = low
		}
		from, err1 := parse(low)
		to, err2 := parse(high)
		if err := cmp.Or(err1, err2); err != nil {
			return nil, err
		}
		switch {
		case from > to:
			return nil, fmt.Errorf("the range %s is empty: its first value is the larger one", text)
		case op == "<" && from == math.MinInt64, op == ">" && to == math.MaxInt64:
			return nil, errors.New("no value is beyond this")
		}
		switch op {
		case "<":
			from, to = math.MinInt64, from-1
		case "<=":
			from = math.MinInt64
		case ">":
			from, to = to+1, math.MaxInt64
		case ">=":
			to = math.MaxInt64
		}
		return func(r *conntrack.Record) bool {
			v, ok := get(r)
			return ok && from <= v && v <= to
		}, nil
	}
}

func parseCount(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a number such as 3", text)
	}
	return n, nil
}

// parseTime parses a duration in ns. A bare 0 is one too.
func parseTime(text string) (int64, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration such as 250ms, 5s or 1h30m", text)
	}
	return int64(d), nil
}

// units are those of sizes.
var units = map[string]float64{
	"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}

func parseSize(text string) (int64, error) {
	end := strings.IndexFunc(text, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if end < 0 {
		end = len(text)
	}
	n, err := strconv.ParseFloat(text[:end], 64)
	unit, ok := units[strings.ToLower(text[end:])]
	if err != nil || !ok || n*unit >= math.MaxInt64 {
		return 0, fmt.Errorf("%q is not a size such as 500, 64KiB, 1MB or 2.5GB", text)
	}
	return int64(n * unit), nil
}
