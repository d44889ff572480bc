package listener

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// withSCTP gives a plane a protocol that cannot be steered.
func withSCTP(lacks error) (*fakeTransport, func(*plane, *Options)) {
	sctp := newFakeTransport()
	sctp.lacks = lacks
	return sctp, func(_ *plane, o *Options) {
		o.Protocols[service.SCTP] = Protocol{Ports: sctp, Available: func() error { return sctp.lacks }, SocketsPerPort: 1, KeepsConnections: true}
	}
}

// overSCTP is a Service with an external IP whose port is SCTP's.
func overSCTP(endpoints ...string) service.Change {
	c := web("assoc", "10.96.0.3", endpoints...)
	c.Services[0].Spec.Ports[0].Protocol = corev1.ProtocolSCTP
	c.Services[0].Spec.ExternalIPs = []string{"192.0.2.3"}
	return c
}

// A protocol that nothing steers has a bound port at each destination, whose address is
// delivered whole to this node; no rule names it.
func TestUnsteeredProtocolIsBound(t *testing.T) {
	sctp, change := withSCTP(nil)
	p := newPlane(t, change)
	p.apply(overSCTP("10.2.1.2"))
	p.want("local 10.96.0.3/32", "local 192.0.2.3/32", "cluster 10.96.0.3", "cluster 192.0.2.3")
	p.apply(overSCTP())
	p.want("local 10.96.0.3/32", "local 192.0.2.3/32", "cluster 10.96.0.3", "cluster 192.0.2.3")
	for dst, action := range sctp.bound {
		check.Equalf(t, action.String(), "refuse", "%s: %s", dst, action)
	}
	check.Equalf(t, len(sctp.bound), 2, "bound: %v", sctp.bound)
}

// While the kernel lacks a protocol, its ports on cluster IPs refuse and nothing else of
// them is served; once it has it, Maintain serves them.
func TestProtocolThatTheKernelLacks(t *testing.T) {
	sctp, change := withSCTP(errors.New("no such protocol"))
	p := newPlane(t, change)
	p.apply(web("web", "10.96.0.1", "10.2.1.2"))
	p.apply(overSCTP("10.2.1.2"))
	without := []string{"local 10.96.0.1/32", "local 10.96.0.3/32", "cluster 10.96.0.1", "cluster 10.96.0.3", "steer TCP 10.96.0.1:80 to 1"}
	p.want(without...)
	if got := p.manager.Stats().Lacking; got != 1 || len(sctp.bound) != 0 {
		t.Errorf("%d cluster IP ports refuse, bound %v", got, sctp.bound)
	}
	check.Equalf(t, p.manager.NextMaintenance(), retryInterval, "it is tried again after")
	p.pass()
	p.want(without...)
	sctp.lacks = nil
	p.pass()
	p.want("local 10.96.0.1/32", "local 10.96.0.3/32", "local 192.0.2.3/32", "cluster 10.96.0.1", "cluster 10.96.0.3", "cluster 192.0.2.3", "steer TCP 10.96.0.1:80 to 1")
	if got := p.manager.Stats().Lacking; got != 0 || len(sctp.bound) != 2 {
		t.Errorf("%d cluster IP ports refuse, bound %v", got, sctp.bound)
	}
	check.Equalf(t, p.manager.NextMaintenance(), verifyInterval, "there is something to try again")
}
