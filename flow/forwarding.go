package flow

import (
	"os"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// forwarding reports whether this network namespace forwards packets of a family.
func forwarding(f service.Family) bool {
	b, err := os.ReadFile(forwardingFile(f))
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

func forwardingFile(f service.Family) string {
	if f == service.IPv6 {
		return "/proc/sys/net/ipv6/conf/all/forwarding"
	}
	return "/proc/sys/net/ipv4/ip_forward"
}
