package flow

import (
	"bufio"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// hiddenPort waits for a flow that hides a client, and returns the node's port that it has.
func (n *node) hiddenPort(vip netip.AddrPort) (port uint16) {
	n.t.Helper()
	wait.True(n.t, "a hidden flow", func() bool {
		for i := range n.server.kernel.Flows {
			k := &n.server.kernel.Flows[i]
			if k.State == bpf.KernelStateOPEN && k.Options&bpf.KernelOptionOPTION_MASQUERADE != 0 && bpf.PortOf(k.Vip, k.VipPort) == vip {
				port = bpf.Wire(k.NodePort)
				return true
			}
		}
		return false
	})
	return port
}

// A socket of the node that asks an endpoint by a port that a hidden client's flow has there
// is answered, and so is the client: the endpoint sees another port of the node's.
func TestNodeBeginsAtAHiddenClientsPort(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"tcp", "udp"} {
		for _, vip := range []string{vip4, vip6} {
			t.Run(network+" "+vip, func(t *testing.T) {
				lab := netns.NewLab(t, 1)
				lab.Backends[0].WitnessTCP(t, 8080)
				lab.Backends[0].WitnessUDP(t, 8080)
				endpoint, own := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddr("10.2.1.1")
				if vip == vip6 {
					endpoint, own = at(lab.Backends[0].IPv6, 8080), netip.MustParseAddr("fd00:2:1::1")
				}
				n := newNode(t, lab, nil)
				n.config.MasqueradeAll = true
				n.apply(svc(vip, nil, endpoint))
				to := at(netip.MustParseAddr(vip), 80)
				// ask says something on a connection. An answer names the server and what it sees: each
				// one of UDP, the first one of TCP.
				seen := make(map[net.Conn]string)
				ask := func(c net.Conn) string {
					t.Helper()
					_ = c.SetDeadline(time.Now().Add(patience))
					r := bufio.NewReader(c)
					_, err := io.WriteString(c, "hello\n")
					if err == nil && (network == "udp" || seen[c] == "") {
						seen[c], err = r.ReadString('\n')
					}
					if err == nil {
						_, err = r.ReadString('\n')
					}
					must.OKf(t, err, "%s to %s", c.LocalAddr(), c.RemoteAddr())
					return seen[c]
				}
				for range 5 {
					c := must.Get(lab.Client.Dial(network, to.String()))(t)
					hidden := ask(c)
					local := net.UDPAddrFromAddrPort(at(own, n.hiddenPort(to)))
					d := &net.Dialer{Timeout: patience, LocalAddr: local}
					if network == "tcp" {
						d.LocalAddr = net.TCPAddrFromAddrPort(local.AddrPort())
					}
					socket, err := lab.Node.Dialer(d, network, endpoint.String())
					must.OKf(t, err, "from %s to %s", local, endpoint)
					for range 3 {
						if said := ask(socket); said == hidden || !strings.HasPrefix(said, "b1:8080 ") {
							t.Errorf("the node: %q, the client: %q", said, hidden)
						}
						check.Equalf(t, ask(c), hidden, "the client again")
					}
					_ = socket.Close()
					_ = c.Close()
					if network == "tcp" {
						wait.True(t, "the client's flow is over", func() bool { return !n.hasOpenFlow() })
					} else {
						n.onLoop(func() {
							for _, f := range n.server.worker.flows {
								if f != nil {
									f.EndConnection(conntrack.Admin)
								}
							}
						})
					}
				}
				n.finish()
				for _, r := range n.taken() {
					if r.Path != conntrack.Kernel || r.Port == nil {
						t.Errorf("%+v", r)
					}
				}
			})
		}
	}
}

// A pod whose own connection rules of others masquerade, to a port that a flow has towards the endpoint, is
// answered, and so is the flow's client.
func TestOthersMasqueradeAtAFlowsPort(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 2)
	lab.Backends[0].WitnessTCP(t, 8080)
	endpoint, to := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddrPort(vip4+":80")
	pod := lab.Backends[1]
	lab.Node.NFT(t, "table ip other {\nchain c {\ntype nat hook postrouting priority 100\nip saddr "+pod.IPv4.String()+" masquerade\n}\n}")
	n := newNode(t, lab, nil)
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, endpoint))
	n.servesNode()
	for what, c := range map[string]net.Conn{
		"a hidden client": lab.Client.Connect(t, "tcp", to.String()), "a client on the node": n.dialFrom("tcp", lab.Node.IPv4, to),
	} {
		said := n.say(c)
		other := n.say(dialFrom(t, pod, c.LocalAddr().(*net.TCPAddr).Port, endpoint.String()))
		if !strings.HasPrefix(said, "b1:8080 10.2.1.1:") || !strings.HasPrefix(other, "b1:8080 10.2.1.1:") || said == other {
			t.Errorf("%s: %q, the pod: %q", what, said, other)
		}
		must.OK(t, must.Err(io.WriteString(c, "again")))
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "again" {
			t.Errorf("%s: %q, %v", what, b, err)
		}
	}
}
