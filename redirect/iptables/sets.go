package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// sets keeps our ipsets of both families.
type sets struct {
	tools *tools
	name  string

	// have is what they hold, by their names in the kernel; nil if that is not
	// known.
	have map[string]elements
}

// wanted gives what the sets have to hold, by their names in the kernel.
func (s *sets) wanted(c *contents) map[string]elements {
	all := map[string]elements{}
	for v := range versions {
		if !s.tools.ns.hasFamily(v) {
			continue
		}
		for l, e := range c.lists[v] {
			all[setName(s.name, l, v)] = e
		}
	}
	return all
}

// typeOf gives the type of a set by its name.
func (s *sets) typeOf(set string) string {
	l, digit := strings.TrimPrefix(set, s.name+"-"), ""
	if i := strings.LastIndexByte(l, '-'); i >= 0 {
		l, digit = l[:i], l[i+1:]
	}
	family := families[v4].ipset
	if digit == families[v6].digit {
		family = families[v6].ipset
	}
	kind := "hash:ip,port"
	switch list(l) {
	case listLocal:
		kind = "hash:net"
	case listCluster:
		kind = "hash:ip"
	}
	return kind + " family " + family + " maxelem 1048576"
}

// add makes sets that are missing and adds elements that are missing; none is
// removed. What is in force before the first time is whatever an earlier
// process left.
func (s *sets) add(want *contents) error {
	if s.have == nil {
		have, err := s.read()
		if err != nil {
			return err
		}
		s.have = have
	}
	var b strings.Builder
	wanted := s.wanted(want)
	names := make([]string, 0, len(wanted))
	for set := range wanted {
		names = append(names, set)
	}
	slices.Sort(names)
	for _, set := range names {
		have, there := s.have[set]
		if !there {
			fmt.Fprintf(&b, "create %s %s\n", set, s.typeOf(set))
		}
		for e := range wanted[set] {
			if _, in := have[e]; !in {
				b.WriteString("add " + set + " " + e.text() + "\n")
			}
		}
	}
	if err := s.restore(b.String()); err != nil {
		return err
	}
	for set, e := range wanted {
		have := s.have[set]
		if have == nil {
			have = elements{}
			s.have[set] = have
		}
		for x := range e {
			have[x] = struct{}{}
		}
	}
	return nil
}

// forget removes elements that are not wanted, and sets that no rule names any
// more.
func (s *sets) forget(want *contents) error {
	wanted := s.wanted(want)
	var b strings.Builder
	for set, have := range s.have {
		w, used := wanted[set]
		if !used {
			b.WriteString("destroy " + set + "\n")
			continue
		}
		for e := range have {
			if _, keep := w[e]; !keep {
				b.WriteString("del " + set + " " + e.text() + "\n")
			}
		}
	}
	if err := s.restore(b.String()); err != nil {
		return err
	}
	s.have = wanted
	return nil
}

// verify reads the sets and puts them right.
func (s *sets) verify(want *contents) (repaired bool, err error) {
	if s.have, err = s.read(); err != nil {
		return false, err
	}
	wanted := s.wanted(want)
	same := len(wanted) == len(s.have)
	for set, w := range wanted {
		have, there := s.have[set]
		same = same && there && sameElements(have, w)
	}
	if same {
		return false, nil
	}
	if err := s.add(want); err != nil {
		return true, err
	}
	return true, s.forget(want)
}

func sameElements(a, b elements) bool {
	if len(a) != len(b) {
		return false
	}
	for e := range a {
		if _, in := b[e]; !in {
			return false
		}
	}
	return true
}

// restore gives commands to ipset, which carries them out one after the other.
// After an error it is not known how many.
func (s *sets) restore(commands string) error {
	if commands == "" {
		return nil
	}
	if _, err := s.tools.ns.run(commands, s.tools.ipset, "restore", "-exist"); err != nil {
		s.have = nil
		return err
	}
	return nil
}

// read gives our sets as they are.
func (s *sets) read() (map[string]elements, error) {
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
func parseSets(text, name string) (map[string]elements, error) {
	all := map[string]elements{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 3 || !strings.HasPrefix(words[1], name+"-") {
			continue
		}
		switch words[0] {
		case "create":
			all[words[1]] = elements{}
		case "add":
			e, err := parseElement(words[2])
			if err != nil {
				return nil, fmt.Errorf("ipset %s: %w", words[1], err)
			}
			if all[words[1]] == nil {
				all[words[1]] = elements{}
			}
			all[words[1]][e] = struct{}{}
		}
	}
	return all, nil
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
	for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
		if protocolName(p) == name {
			e.protocol = p
		}
	}
	port, err := strconv.ParseUint(number, 10, 16)
	if err == nil && e.protocol == 0 {
		err = errors.New("protocol " + strconv.Quote(name))
	}
	e.port = uint16(port)
	return e, err
}

// remove destroys our sets, and gives a line for each.
func (s *sets) remove() (removed []string, err error) {
	s.have = nil
	have, err := s.read()
	if err != nil {
		if denied(err) {
			return nil, err
		}
		return nil, nil // a kernel without sets has none of ours
	}
	var b strings.Builder
	for set := range have {
		b.WriteString("destroy " + set + "\n")
		removed = append(removed, "ipset "+set)
	}
	slices.Sort(removed)
	if err := s.restore(b.String()); err != nil {
		return nil, err
	}
	return removed, nil
}
