package web

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// hosts are the names by which browsers may ask.
type hosts map[string]struct{}

// newHosts checks names: hosts without a port.
func newHosts(names []string) (hosts, error) {
	h := make(hosts, len(names))
	for _, name := range names {
		if name == "" || strings.ContainsAny(name, "/:@* ") && !isAddress(name) {
			return nil, fmt.Errorf("%q is not the name of a host, without a port", name)
		}
		h[normal(name)] = struct{}{}
	}
	return h, nil
}

func isAddress(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil
}

// normal returns the form of a host's name by which it is compared.
func normal(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// allow reports whether the Host header of a request names this server. Any site may
// have its own name resolve to our address, and its page would then share our origin;
// but it cannot make the browser send another name. The port does not matter: kubectl
// port-forward has one of its own.
func (h hosts) allow(r *http.Request) bool {
	name := r.Host
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	if _, ok := h[normal(name)]; ok || isLoopbackName(name) {
		return true
	}
	addr, err := netip.ParseAddr(name)
	if err != nil {
		return false
	}
	addr = addr.Unmap()
	if addr.IsLoopback() {
		return true
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && local.AddrPort().Addr().Unmap().WithZone("") == addr.WithZone("")
}
