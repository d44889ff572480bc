package tproxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
)

// Dump gives what is in force, as the kernel has it: a line for each thing, in an
// order that is always the same. It is empty when there is nothing.
//
//	table inet sluice: 8 chains, 28 rules
//	  steer TCP 10.96.0.10:80 to 127.83.76.1:40001
//	  refuse TCP 10.96.0.11:80
//	  cluster 10.96.0.10
//	  local 10.96.0.0/16
//	route local 10.96.0.0/16 dev lo proto 83 src 10.1.0.1
func Dump(opts Options) (string, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return "", err
	}
	rd, err := openReader(opts.Routes.NetNS)
	if err != nil {
		return "", err
	}
	defer rd.Close()
	rt, err := route.Open(opts.Routes)
	if err != nil {
		return "", err
	}
	defer rt.Close()
	var b strings.Builder
	err = dumpTable(&b, rd, opts.Table)
	lines, routeErr := rt.Dump()
	for _, l := range lines {
		fmt.Fprintln(&b, l)
	}
	return b.String(), errors.Join(err, routeErr)
}

func dumpTable(b *strings.Builder, rd *reader, table string) error {
	c, err := rd.contents(table)
	if err != nil || !c.exists {
		return err
	}
	fmt.Fprintf(b, "table inet %s: %d chains, %d rules\n", table, len(c.chains), c.rules)
	frame, err := rd.frame(table)
	if err != nil {
		return err
	}
	inUse := generationInUse(frame)
	for k := range kinds {
		for v := range versions {
			lines, err := dumpSet(rd, table, k, v, inUse)
			if err != nil {
				return err
			}
			for _, line := range lines {
				fmt.Fprintf(b, "  %s %s\n", kindNames[k], line)
			}
		}
	}
	return nil
}

// dumpSet reads a set until it is told twice in the same way; see setMatches.
func dumpSet(rd *reader, table string, k kind, v version, generation int) (lines []string, err error) {
	for i := range readsOfSet {
		list, err := rd.elements(table, setName(k, v, generation))
		if err != nil {
			return nil, err
		}
		again := describeElements(k, v, list)
		if i > 0 && slices.Equal(lines, again) {
			break
		}
		lines = again
	}
	return lines, nil
}

// generationInUse gives the generation of the sets that the rules name; 0 if
// there are no rules.
func generationInUse(frame []byte) int {
	_, rest, found := bytes.Cut(frame, []byte(kindNames[steer]+families[v4].digit+"-"))
	if !found {
		return 0
	}
	digits, _, _ := bytes.Cut(rest, []byte{0})
	generation, err := strconv.Atoi(string(digits))
	if err != nil {
		return 0
	}
	return generation
}

func describeElements(k kind, v version, list []element) []string {
	switch k {
	case local:
		return describeRanges(list)
	case ownPort:
		return nil // says nothing that own does not
	}
	slices.SortFunc(list, func(a, b element) int { return strings.Compare(a.sortKey(k), b.sortKey(k)) })
	lines := make([]string, 0, len(list))
	for _, e := range list {
		lines = append(lines, e.describe(k, v))
	}
	return lines
}

// sortKey orders destinations by address, port and protocol.
func (e element) sortKey(k kind) string {
	n := len(e.key) - 8
	if k == cluster || k == foreign || k == node || k == linger || n < 0 {
		return e.key
	}
	return e.key[:n] + e.key[n+4:] + e.key[n:n+4]
}

func (e element) describe(k kind, v version) string {
	if k == cluster || k == foreign || k == node {
		a, _ := netip.AddrFromSlice([]byte(e.key))
		return a.String()
	}
	if k == linger {
		flow, _ := parseFlowKey([]byte(e.key))
		return tcpDestination(flow.here).String() + " from " + flow.client.String()
	}
	d, ok := parseDestinationKey([]byte(e.key))
	if !ok {
		return fmt.Sprintf("key %x", e.key)
	}
	if k != steer && k != take || len(e.value) != 2 {
		return d.String()
	}
	listen, _ := netip.AddrFromSlice(families[v].listen)
	return d.String() + " to " + netip.AddrPortFrom(listen, uint16(e.value[0])<<8|uint16(e.value[1])).String()
}

// describeRanges puts the ends of intervals together again.
func describeRanges(list []element) []string {
	var starts, ends []netip.Addr
	for _, e := range list {
		a, ok := netip.AddrFromSlice([]byte(e.key))
		switch {
		case !ok:
		case e.end:
			ends = append(ends, a)
		default:
			starts = append(starts, a)
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	slices.SortFunc(ends, netip.Addr.Compare)
	var lines []string
	for _, start := range starts {
		for len(ends) > 0 && ends[0].Compare(start) <= 0 {
			ends = ends[1:]
		}
		if len(ends) == 0 {
			lines = append(lines, start.String()+" and all after it")
			continue
		}
		lines = append(lines, describeRange(start, ends[0].Prev()))
	}
	return lines
}

// describeRange gives a prefix where one fits.
func describeRange(first, last netip.Addr) string {
	for bits := 0; bits <= first.BitLen(); bits++ {
		if p := netip.PrefixFrom(first, bits); p.Masked().Addr() == first && lastAddr(p) == last {
			return p.String()
		}
	}
	return first.String() + "-" + last.String()
}

// parseDestinationKey is destinationKey backwards.
func parseDestinationKey(key []byte) (service.Destination, bool) {
	n := len(key) - 8
	if n < 0 {
		return service.Destination{}, false
	}
	a, ok := netip.AddrFromSlice(key[:n])
	if !ok {
		return service.Destination{}, false
	}
	return service.Destination{Addr: a, Protocol: redirect.ProtocolOf(key[n]), Port: binary.BigEndian.Uint16(key[n+4:])}, true
}

// parseFlowKey is key backwards.
func parseFlowKey(key []byte) (k flow, ok bool) {
	n := len(key)/2 - 4
	if n != 4 && n != 16 {
		return k, false
	}
	end := func(b []byte) netip.AddrPort { return endOf(b[:n], uint16(b[n])<<8|uint16(b[n+1])) }
	return flow{client: end(key[:n+4]), here: end(key[n+4:])}, true
}
