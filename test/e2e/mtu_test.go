package e2e

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestDatagramsPassASmallerLinkBehindTheNode has a smaller link on the path to an
// endpoint, behind a router that does not report it in time. The first datagram
// that does not fit must arrive whole, and so must the answer, whichever address
// the endpoint sees.
func TestDatagramsPassASmallerLinkBehindTheNode(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(datagrams) {
			return
		}
		w := newWorld(t, "udp", []row{{name: "web", endpoints: "there"}})
		o := w.services[0]
		o.target = 9000
		reflector(t, w.Remote[0], o.target)
		for h, link := range map[*netns.Host]string{w.Node2: w.Remote[0].Name(), w.Remote[0]: "eth0"} {
			l, err := h.Netlink().LinkByName(link)
			if err == nil {
				err = h.Netlink().LinkSetMTU(l, 1280)
			}
			must.OKf(t, err, "%s, interface %s", h.Name(), link)
		}
		p := w.proxy(t, m)
		p.start(decisionFlags()...)
		for _, c := range w.clients {
			if m.lacks(fragments) && c.name == "pod" {
				continue // a fragmented answer to a client's own address is lost
			}
			to := o.at(clusterIP)[0] // IPv6 routers do not fragment
			check.OKf(t, w.reflected(c, to, []int{unfragmented, 1, unfragmented}), "%s to %s", c.name, to)
		}
		p.stop()
	})
}
