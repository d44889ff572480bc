package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestConnectionsFromTheNodeTakeNoServersPorts holds connections and sessions
// whose endpoints see the node's address, outside connection tracking. Their local
// ports are those of the node's clients (net.ipv4.ip_local_port_range), so that a
// server can bind every other port, on all addresses and without SO_REUSEADDR.
func TestConnectionsFromTheNodeTakeNoServersPorts(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Node.TrackConnections(t)
			lab.Backends[0].EchoTCP(t, 8080)
			lab.Backends[0].EchoUDP(t, 8080)
			p := newProxy(t, lab.Node)
			p.mode = m
			for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
				p.put(&object{
					name: strings.ToLower(string(protocol)), kind: corev1.ServiceTypeClusterIP, vips: []string{vip4, vip6}, port: 53, target: 8080,
					protocol: protocol, endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}},
				})
			}
			p.start("--masquerade-all")
			tracked := lab.Node.Tracked(t)
			const each = 100
			for i := range each {
				for _, vip := range []string{vip4, vip6} {
					for _, network := range []string{"tcp", "udp"} {
						conn := lab.Client.Connect(t, network, net.JoinHostPort(vip, "53"))
						if said, err := exchange(conn, fmt.Sprint(i), startTimeout); err != nil {
							t.Fatalf("%s to %s: %q, %v", network, vip, said, err)
						}
					}
				}
			}
			if now := lab.Node.Tracked(t); now > tracked && !m.lacks(untracked) {
				t.Errorf("%d more connections are tracked", now-tracked)
			}
			if ports := unbindable(t, lab.Node); len(ports) > 0 {
				t.Errorf("%d ports cannot be bound, %s for example", len(ports), ports[0])
			}
			p.stop()
		})
	}
}

// unbindable binds each of the ports of clients' addresses, on all addresses, and
// returns those that fail. It leaves out the port of the proxy's metrics.
func unbindable(t *testing.T, h *netns.Host) (ports []string) {
	t.Helper()
	metrics := netip.MustParseAddrPort(metricsAddress)
	must.OK(t, h.Do(func() error {
		for port := int(redirect.ReplyPorts[0]); port <= int(redirect.ReplyPorts[1]); port++ {
			if port == int(metrics.Port()) {
				continue
			}
			for network, kind := range map[string]int{"TCP": unix.SOCK_STREAM, "UDP": unix.SOCK_DGRAM} {
				for _, address := range []unix.Sockaddr{&unix.SockaddrInet4{Port: port}, &unix.SockaddrInet6{Port: port}} {
					if err := bindOnce(kind, address); err != nil {
						ports = append(ports, fmt.Sprintf("%s %d (%T: %v)", network, port, address, err))
					}
				}
			}
		}
		return nil
	}))
	return ports
}

// bindOnce binds a socket while no other test forks: a child process would inherit
// it.
func bindOnce(kind int, address unix.Sockaddr) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	family := unix.AF_INET
	if _, is := address.(*unix.SockaddrInet6); is {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Bind(fd, address)
}
