package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

const (
	proxyProtocol       = "proxy-protocol"
	acceptProxyProtocol = "accept-proxy-protocol"
)

// mostProxies bounds the ranges of Port.AcceptProxy, which each connection is compared with.
const mostProxies = 64

// parseProxyVersion reads the version of the PROXY protocol that endpoints get.
func parseProxyVersion(text string) (version uint8, err error) {
	switch text {
	case "v1":
		return 1, nil
	case "v2":
		return 2, nil
	}
	return 0, fmt.Errorf("%s: %q is not one of v1, v2", proxyProtocol, text)
}

// parseProxies reads the addresses that may send PROXY headers.
func parseProxies(text string) (list []netip.Prefix, err error) {
	for one := range strings.SplitSeq(text, ",") {
		p, ok := parsePrefix(strings.TrimSpace(one))
		if !ok || len(list) == mostProxies {
			return nil, fmt.Errorf("%s: %q is not a list of 1 to %d CIDRs such as 10.0.0.0/8,fd00::/8", acceptProxyProtocol, text, mostProxies)
		}
		list = append(list, p)
	}
	return list, nil
}

// parseProxyProtocol reads both annotations. A wrong one has no effect.
func (s *spec) parseProxyProtocol() {
	var err error
	if text, ok := s.annotations[proxyProtocol]; ok {
		if s.sendProxy, err = parseProxyVersion(text); err != nil {
			s.problemf("annotation %s%v; endpoints get no header", annotationPrefix, err)
		}
	}
	if text, ok := s.annotations[acceptProxyProtocol]; ok {
		if s.acceptProxy, err = parseProxies(text); err != nil {
			s.problemf("annotation %s%v; no header is accepted", annotationPrefix, err)
		}
	}
}

// Trusts reports whether a peer may, and must, begin its connections with a PROXY header.
func (p *Port) Trusts(peer netip.Addr) bool {
	return slices.ContainsFunc(p.AcceptProxy, func(r netip.Prefix) bool { return r.Contains(peer) })
}
