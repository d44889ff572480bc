package flow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Addresses of a trial, for documentation (RFC 5737): if it went wrong, nobody would be
// harmed. The node has the address before each host's.
var (
	trialClient   = netip.MustParseAddr("198.51.100.2")
	trialEndpoint = netip.MustParseAddr("203.0.113.2")
	trialVIP      = netip.MustParseAddr("192.0.2.1")
)

// trialPatience bounds each attempt to connect in a trial. An interface that has just come
// up may lose its first packets, and a node that boots may be busy for seconds.
var trialPatience = []time.Duration{20 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, time.Second, 3 * time.Second}

// Try forwards a connection between temporary network namespaces, and returns why that
// does not work here.
func Try() (err error) {
	if !forwarding(service.IPv4) && !forwarding(service.IPv6) {
		return errForwarding
	}
	var spaces [3]*scratch.Namespace
	for i, name := range []string{"client", "node", "endpoint"} {
		if spaces[i], err = scratch.New(name); err != nil {
			return err
		}
		defer spaces[i].Close()
	}
	client, node, endpoint := spaces[0], spaces[1], spaces[2]
	if err := cmp.Or(cable(node, client, trialClient), cable(node, endpoint, trialEndpoint)); err != nil {
		return fmt.Errorf("veth for a trial: %w", err)
	}
	err = node.Do(func() error {
		// Written where that is allowed; otherwise it must be as on the node.
		_ = os.WriteFile(forwardingFile(service.IPv4), []byte("1"), 0)
		if !forwarding(service.IPv4) {
			return errForwarding
		}
		return nil
	})
	if err != nil {
		return err
	}
	var l net.Listener
	if err := endpoint.Do(func() (err error) {
		l, err = net.Listen("tcp4", ":80")
		return err
	}); err != nil {
		return err
	}
	defer l.Close()
	return withServer(node, func() error {
		return client.Do(func() error { return connects(l) })
	})
}

var errForwarding = errors.New("this node forwards no packets (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding)")

// cable joins a host to the node, whose interface gets the host's name.
func cable(node, host *scratch.Namespace, addr netip.Addr) error {
	const bits, peer = 24, "trial"
	name, gateway := host.String(), addr.Prev()
	return cmp.Or(
		node.Wire(name, host, peer),
		node.AddAddresses(name, netip.PrefixFrom(gateway, bits)),
		host.AddAddresses(peer, netip.PrefixFrom(addr, bits)),
		host.AddRoute(netip.PrefixFrom(netip.IPv4Unspecified(), 0), gateway))
}

// withServer runs f while a Server serves the trial's Service in a namespace.
func withServer(node *scratch.Namespace, f func() error) error {
	loop, err := poll.New()
	if err != nil {
		return err
	}
	table := conntrack.NewTable(conntrack.Options{Shards: 1})
	var s *Server
	err = node.Do(func() (err error) {
		s, err = New(Options{
			MaxFlows: 64, Namespace: node.FD(), Loop: loop, Shard: table.Shard(0), Table: table,
			UDPTimeout: time.Minute, UDPStreamTimeout: time.Minute, Logger: zerolog.Nop(),
		})
		return err
	})
	if err != nil {
		loop.Stop()
		return err
	}
	path := s.Over(&trialRelay{balancer: balancer.New(balancer.Options{})}, service.TCP)
	var running sync.WaitGroup
	running.Go(func() { _ = loop.Run() })
	defer s.Close()
	defer running.Wait()
	defer loop.Stop()
	defer func() { _ = s.Stop(context.Background()) }()
	if err := s.Start(); err != nil {
		return err
	}
	path.Apply(trialTable(), hostnet.NewAddresses(nil))
	return f()
}

// trialTable is the policy of the trial's Service.
func trialTable() *policy.Table {
	tcp, port := corev1.ProtocolTCP, int32(80)
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "trial", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "trial"}}
	}
	store := service.NewStore(service.StoreOptions{})
	return policy.Compile(nil, store.Apply(service.Change{
		Services: []*corev1.Service{{ObjectMeta: meta("trial"), Spec: corev1.ServiceSpec{
			ClusterIP: trialVIP.String(), Ports: []corev1.ServicePort{{Port: port, Protocol: tcp}},
		}}},
		EndpointSlices: []*discoveryv1.EndpointSlice{{
			ObjectMeta: meta("trial-1"), AddressType: discoveryv1.AddressTypeIPv4,
			Ports:     []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{trialEndpoint.String()}}},
		}},
	}), policy.Config{})
}

// connects connects to the Service, and to the listener behind it.
func connects(l net.Listener) error {
	var err error
	for _, patience := range trialPatience {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		var c net.Conn
		// Go makes the socket on this thread.
		c, err = new(net.Dialer).DialContext(ctx, "tcp4", netip.AddrPortFrom(trialVIP, 80).String())
		cancel()
		if err != nil {
			continue
		}
		defer c.Close()
		return arrives(l, c.LocalAddr().String())
	}
	return fmt.Errorf("a connection through the kernel: %w", err)
}

// arrives waits for a client's connection. Those of earlier attempts may come before it.
func arrives(l net.Listener, client string) error {
	peer := ""
	for range trialPatience {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		peer = c.RemoteAddr().String()
		_ = c.Close()
		if peer == client {
			return nil
		}
	}
	return fmt.Errorf("the endpoint saw %s in place of %s", peer, client)
}

// trialRelay serves nothing.
type trialRelay struct {
	Relay    // nil: the control plane is not there
	balancer *balancer.Balancer
}

func (r *trialRelay) Balancer(service.PortName) *balancer.Balancer { return r.balancer }
