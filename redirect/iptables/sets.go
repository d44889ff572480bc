package iptables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
)

// sets keeps our ipsets.
type sets struct {
	tools    *tools
	name     string
	families [versions]bool // those that the kernel has

	// sizes are how many elements each set has; nil if that is not known.
	sizes setSizes
	// unread is how many looks there are until the elements are read.
	unread int
}

func newSets(t *tools, name string) *sets {
	s := &sets{tools: t, name: name}
	for v := range versions {
		s.families[v] = t.ns.hasFamily(v)
	}
	return s
}

// place is where a set belongs.
type place struct {
	version version
	list    list
}

// setSizes are numbers of elements by set.
type setSizes map[place]int

// after returns the sizes after some edits.
func (n setSizes) after(e *edits) setSizes {
	next := maps.Clone(n)
	for _, x := range e.add {
		next[place{x.version, x.list}]++
	}
	for _, x := range e.drop {
		next[place{x.version, x.list}]--
	}
	return next
}

// outline returns the lists that need rules: those that are not empty, and those that
// always have rules.
func (n setSizes) outline() *contents {
	c := &contents{}
	for v := range versions {
		c.lists[v] = map[list]elements{}
		for _, l := range fixed {
			c.lists[v][l] = nil
		}
	}
	for p, size := range n {
		if size > 0 {
			c.lists[p.version][p.list] = nil
		}
	}
	return c
}

// covers reports whether the current rules suffice for another outline. Rules about an
// empty set do nothing, and stay until rules are written for another reason, so that
// a Service without endpoints for a while causes no writing.
func (c *contents) covers(o *contents) bool {
	for v := range versions {
		for l := range o.lists[v] {
			if !c.has(v, l) {
				return false
			}
		}
	}
	return c.sockets == o.sockets
}

// typeOf returns the type of a set.
func typeOf(p place) string {
	kind := "hash:ip,port"
	switch p.list {
	case listLocal:
		kind = "hash:net"
	case listCluster, listNode:
		kind = "hash:ip"
	}
	return kind + " family " + families[p.version].ipset + " maxelem 1048576"
}

// compare reads the sets and gives the edits that make them those of a plan. At
// first, they may hold what an earlier process left.
func (s *sets) compare(want *contents) (e edits, err error) {
	have, err := s.read()
	if err != nil {
		return e, err
	}
	s.sizes = setSizes{}
	for p, elements := range have {
		s.sizes[p] = len(elements)
		wanted := want.lists[p.version][p.list]
		for x := range elements {
			if _, in := wanted[x]; !in {
				e.drop = append(e.drop, edit{p.version, p.list, x})
			}
		}
	}
	for v := range versions {
		if !s.families[v] {
			continue
		}
		for l, elements := range want.lists[v] {
			there := have[place{v, l}]
			for x := range elements {
				if _, in := there[x]; !in {
					e.add = append(e.add, edit{v, l, x})
				}
			}
		}
	}
	return e, nil
}

// put adds elements, and then removes others, by one call of ipset, or none. Sets that are
// missing are made.
func (s *sets) put(e edits) error {
	var b strings.Builder
	ensure := func(p place) {
		if _, is := s.sizes[p]; !is && s.families[p.version] {
			fmt.Fprintf(&b, "create %s %s\n", setName(s.name, p.list, p.version), typeOf(p))
			s.sizes[p] = 0
		}
	}
	for v := range versions {
		for _, l := range fixed {
			ensure(place{v, l})
		}
	}
	do := func(verb string, x edit, by int) {
		if !s.families[x.version] {
			return
		}
		p := place{x.version, x.list}
		ensure(p)
		b.WriteString(verb + " " + setName(s.name, x.list, x.version) + " " + x.element.text() + "\n")
		s.sizes[p] += by
	}
	for _, x := range e.add {
		do("add", x, 1)
	}
	for _, x := range e.drop {
		do("del", x, -1)
	}
	return s.restore(b.String())
}

// destroy removes the sets that no rule names any more.
func (s *sets) destroy(named *contents) error {
	var b strings.Builder
	for p := range s.sizes {
		if !named.has(p.version, p.list) {
			b.WriteString("destroy " + setName(s.name, p.list, p.version) + "\n")
			delete(s.sizes, p)
		}
	}
	return s.restore(b.String())
}

// readEvery is how many looks there are at the sets' sizes from one at their
// elements to the next: reading them takes some 10 ms for each thousand Services.
const readEvery = 6

// look compares the sizes of the sets with those of a plan, and every readEvery-th
// time all elements.
func (s *sets) look(want *redirect.Plan) (same bool, err error) {
	if s.sizes == nil {
		return false, nil
	}
	out, err := s.tools.ns.run("", s.tools.ipset, "list", "-terse")
	if err != nil {
		return false, err
	}
	now, err := parseSizes(out, s.name)
	if err != nil || !maps.Equal(now, s.sizes) {
		return false, err
	}
	if s.unread--; s.unread >= 0 {
		return true, nil
	}
	s.unread = readEvery - 1
	e, err := s.compare(contentsOf(want))
	return len(e.add)+len(e.drop) == 0, err
}

// restore gives commands to ipset, which carries them out one after the other.
// After an error it is not known how many.
func (s *sets) restore(commands string) error {
	if commands == "" {
		return nil
	}
	if _, err := s.tools.ns.run(commands, s.tools.ipset, "restore", "-exist"); err != nil {
		s.sizes = nil
		return err
	}
	return nil
}

// read returns our sets as they are.
func (s *sets) read() (map[place]elements, error) {
	out, err := s.tools.ns.run("", s.tools.ipset, "save")
	if err != nil {
		return nil, err
	}
	return parseSets(out, s.name)
}

// parseSets picks our sets out of what ipset saves:
//
//	create sluice-refuse-4 hash:ip,port family inet hashsize 1024 maxelem 1048576
//	add sluice-refuse-4 10.96.0.11,tcp:80
func parseSets(text, name string) (map[place]elements, error) {
	all := map[place]elements{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 3 {
			continue
		}
		p, ours := parseSetName(words[1], name)
		if !ours {
			continue
		}
		if all[p] == nil {
			all[p] = elements{}
		}
		if words[0] == "add" {
			e, err := parseElement(words[2])
			if err != nil {
				return nil, fmt.Errorf("ipset %s: %w", words[1], err)
			}
			all[p][e] = struct{}{}
		}
	}
	return all, nil
}

// parseSizes picks the sizes of our sets out of what ipset lists:
//
//	Name: sluice-refuse-4
//	Number of entries: 1
func parseSizes(text, name string) (setSizes, error) {
	all := setSizes{}
	var p place
	var ours bool
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Name":
			p, ours = parseSetName(value, name)
		case "Number of entries":
			n, err := strconv.Atoi(value)
			if err != nil {
				return nil, fmt.Errorf("ipset: %q", line)
			}
			if ours {
				all[p] = n
			}
		}
	}
	return all, nil
}

// parseSetName is setName backwards.
func parseSetName(set, name string) (p place, ours bool) {
	l, ours := strings.CutPrefix(set, name+"-")
	for v := range versions {
		if of, is := strings.CutSuffix(l, "-"+families[v].digit); is && ours {
			return place{v, list(of)}, true
		}
	}
	return p, false
}

// parseElement is element.text backwards.
func parseElement(text string) (e element, err error) {
	addr, rest, isDestination := strings.Cut(text, ",")
	if strings.Contains(addr, "/") {
		e.prefix, err = netip.ParsePrefix(addr)
	} else {
		var a netip.Addr
		if a, err = netip.ParseAddr(addr); err == nil {
			e.prefix = netip.PrefixFrom(a, a.BitLen())
		}
	}
	if err != nil || !isDestination {
		return e, err
	}
	name, number, _ := strings.Cut(rest, ":")
	e.protocol = protocolOf(name)
	port, err := strconv.ParseUint(number, 10, 16)
	if err == nil && e.protocol == 0 {
		err = errors.New("protocol " + strconv.Quote(name))
	}
	e.port = uint16(port)
	return e, err
}

// remove destroys our sets, and gives a line for each. nf_tables lets go of a set some time after
// the rule that named it.
func (s *sets) remove() (removed []string, err error) {
	s.sizes = nil
	for deadline := time.Now().Add(releasePatience); ; time.Sleep(releasePause) {
		have, err := s.read()
		if err != nil {
			if denied(err) {
				return nil, err
			}
			return removed, nil // a kernel without sets has none of ours
		}
		var b strings.Builder
		for p := range have {
			set := setName(s.name, p.list, p.version)
			b.WriteString("destroy " + set + "\n")
			if line := "ipset " + set; !slices.Contains(removed, line) {
				removed = append(removed, line)
			}
		}
		slices.Sort(removed)
		err = s.restore(b.String())
		if err == nil {
			return removed, nil
		}
		if !strings.Contains(err.Error(), "in use by a kernel component") || time.Now().After(deadline) {
			return nil, err
		}
	}
}

const (
	releasePatience = 2 * time.Second
	releasePause    = 20 * time.Millisecond
)
