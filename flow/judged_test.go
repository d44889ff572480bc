package flow

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Annotations leave a Service to the relay until there are rules for forwarded packets, and again
// once these are gone. What is not known at the start counts as rules, and later as no change.
func TestRulesOverrideAnnotations(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	var found atomic.Pointer[string] // nil: they cannot be read
	var unread atomic.Int32          // how often
	n := newNode(t, lab, func(o *Options) {
		o.Judges = func() ([]string, error) {
			switch rule := found.Load(); {
			case rule == nil:
				unread.Add(1)
				return nil, errors.New("not known")
			case *rule == "":
				return nil, nil
			default:
				return []string{*rule}, nil
			}
		}
	})
	change := svc(vip4, func(s *corev1.Service) { s.Annotations["sluice.dev/datapath"] = "relay" }, at(lab.Backends[0].IPv4, 8080))
	follow := func(what string, rule *string) {
		t.Helper()
		found.Store(rule)
		wait.True(t, what, func() bool { return n.server.Judged() == *rule })
		wait.True(t, "the data path is told", func() bool { return len(n.server.Changed()) > 0 })
		<-n.server.Changed()
		n.apply(service.Change{})
	}
	vip := netip.MustParseAddrPort(vip4 + ":80")
	judged := func(want bool) {
		t.Helper()
		var port *service.Port
		for _, p := range n.ports {
			if p != nil && p.Name.Protocol == service.TCP {
				port = p
			}
		}
		client := netip.AddrPortFrom(lab.Client.IPv4, 1000)
		n.server.Session(client, vip, true)
		check.Equalf(t, n.server.Refuses(client, vip, port), want, "the relay refuses a client")
		ofUDP := *port
		ofUDP.Name.Protocol = service.UDP
		n.server.Refuses(client, vip, &ofUDP)
		key, left := bpf.TupleOf(syscall.IPPROTO_UDP, client, vip), uint64(0)
		if err := n.server.kernel.Maps.Sessions.Lookup(&key, &left); (err != nil) != want {
			t.Errorf("a session that the relay refuses: %v", err)
		}
		for _, own := range []netip.Addr{lab.Node.IPv4, netip.MustParseAddr("127.0.0.1")} {
			if n.server.Refuses(netip.AddrPortFrom(own, 1000), vip, port) {
				t.Errorf("the relay refuses this node's own client %s", own)
			}
		}
		check.Equalf(t, len(n.server.paths[service.TCP].services[port.Name].destinations) > 0, want, "the kernel serves the Service")
	}
	rule, none := "chain forward", ""
	select {
	case <-n.server.Changed(): // of the start
	default:
	}
	n.apply(change)
	judged(true)
	check.OK(t, must.Err(lab.Client.Ask("tcp", vip.String())))
	follow("there are no rules", &none)
	judged(false)
	follow("rules come", &rule)
	judged(true)
	check.OK(t, must.Err(lab.Client.Ask("tcp", vip.String())))
	before := unread.Load()
	found.Store(nil)
	wait.True(t, "the watcher has handled that they cannot be read", func() bool { return unread.Load() > before+1 })
	check.Equalf(t, n.server.Judged(), rule, "rules that cannot be read")
	check.Equalf(t, n.server.Stats().Refused, 4, "clients are refused")
}

// Rules of others take the relay from a Service whose annotations ask for it, but not from one
// with PROXY headers: without the relay, its clients could write these themselves.
func TestRulesLeaveProxyHeadersToTheRelay(t *testing.T) {
	for _, c := range []struct {
		what           string
		port           service.Port
		kernel, judged bool // what serves without such rules, and with them
	}{
		{"nothing", service.Port{}, true, true},
		{"datapath", service.Port{Annotations: map[string]string{pathAnnotation: "relay"}}, false, true},
		{"max-connections", service.Port{Limits: service.Limits{Connections: 1}}, true, true},
		{"max-connections-per-endpoint", service.Port{Limits: service.Limits{PerEndpoint: 1}}, true, true},
		{"queue-timeout", service.Port{Limits: service.Limits{PerEndpoint: 1, Queue: time.Second}}, false, true},
		{"hold", service.Port{Hold: time.Second}, false, true},
		{"rebalance", service.Port{Rebalance: time.Second}, false, true},
		{"proxy-protocol", service.Port{SendProxy: 2}, false, false},
		{"proxy-protocol and hold", service.Port{SendProxy: 1, Hold: time.Second}, false, false},
		{"accept-proxy-protocol", service.Port{AcceptProxy: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}, false, false},
	} {
		if kernel, problem := eligible(&c.port, false); kernel != c.kernel || problem != nil {
			t.Errorf("%s: the kernel serves it: %t, %v; want %t", c.what, kernel, problem, c.kernel)
		}
		kernel, problem := eligible(&c.port, true)
		if kernel != c.judged || (problem != nil) == c.kernel {
			t.Errorf("%s, with rules: the kernel serves it: %t, %v; want %t", c.what, kernel, problem, c.judged)
		}
	}
}
