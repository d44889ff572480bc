// Program cache is CoreDNS with the plugins of NodeLocal DNSCache, whose own program is no
// module that the Go proxy has.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/hosts"
)

func main() {
	dnsserver.Directives = []string{"bind", "errors", "cache", "hosts", "forward"}
	coremain.Run()
}
