package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// silence is how long a client that expects no answer waits. It repeats its SYN
// once in that time.
const silence = 1200 * time.Millisecond

// decisionFlags are the flags of every cluster that change decisions.
func decisionFlags(extra ...string) []string {
	return append([]string{"--cluster-cidr", "10.244.0.0/16,fd00:244::/32"}, extra...)
}

// newClusterProxy prepares a proxy on a cluster's node, with the nodes' objects.
func newClusterProxy(t *testing.T, c *netns.Cluster) *proxy {
	t.Helper()
	p := newProxy(t, c.Node)
	p.write("nodes.yaml", nodeYAML("node", []netip.Addr{c.Node.IPv4, c.Node.IPv6}, netns.NodePods)+
		"---\n"+nodeYAML("node2", []netip.Addr{c.Node2.IPv4, c.Node2.IPv6}, netns.Node2Pods))
	return p
}

// put writes a Service's manifests.
func (p *proxy) put(o *object) {
	p.t.Helper()
	p.write(o.name+".yaml", o.yaml())
}

// settled makes a change that has an effect, and waits until the whole
// configuration is in force. A change of the node's addresses, such as the late end of a
// new interface's start, puts the old objects in force once more: so the change has to
// have been read first.
func (p *proxy) settled(change func()) {
	p.t.Helper()
	began := time.Now()
	change()
	wait.For(p.t, "the change is in force", startTimeout, func() error {
		m, err := p.metrics()
		read := m[`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`]
		if err == nil && (read < float64(began.UnixNano())/1e9 || m["sluice_config_applied_timestamp_seconds"] < read) {
			err = errNotYet
		}
		return err
	})
}

// client is a source of connections.
type client struct {
	name string
	*netns.Host
	bind []netip.Addr // an address for each family, if it is not the host's usual one
}

// dial connects and returns who answered and which address the endpoint saw:
// "client", "node", or the address. Without an answer it returns "refused",
// "silent", or the error. patience is how long it waits for an answer to its SYN.
func (c client) dial(to netip.AddrPort, node []netip.Addr, patience time.Duration) string {
	_, said := c.visit("tcp", to, node, patience)
	return said
}

// visit is dial by "tcp" or "udp"; for UDP it sends one datagram. It also returns
// the client's own address.
func (c client) visit(network string, to netip.AddrPort, node []netip.Addr, patience time.Duration) (own netip.AddrPort, said string) {
	conn, err := c.Dialer(c.dialer(network, to, patience), network, to.String())
	if err != nil {
		return own, trouble(err)
	}
	defer conn.Close()
	own = netip.MustParseAddrPort(conn.LocalAddr().String())
	if network == "udp" {
		// A refusal is sent once, and may be lost where many are refused at once:
		// so ask again.
		for left := patience; ; left -= silence {
			if said, err = exchange(conn, "hello", min(left, silence)); err == nil || left <= silence || trouble(err) != "silent" {
				break
			}
		}
		said, _, _ = strings.Cut(said, "\n")
	} else {
		said, err = netns.AskOn(conn)
	}
	if err != nil {
		return own, trouble(err)
	}
	name, seen, _ := strings.Cut(said, " ")
	return own, name + " " + c.whose(seen, own, node)
}

// dialer is bound to the client's address, if it has one.
func (c client) dialer(network string, to netip.AddrPort, patience time.Duration) *net.Dialer {
	d := &net.Dialer{Timeout: patience}
	if c.bind == nil {
		return d
	}
	own := netip.AddrPortFrom(netns.Pick(c.bind, to.Addr()), 0)
	d.LocalAddr = net.TCPAddrFromAddrPort(own)
	if network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(own)
	}
	return d
}

// trouble names an error as a client sees it.
func trouble(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EPERM): // netfilter refuses the node's own datagrams with EPERM
		return "refused"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silent"
	}
	return err.Error()
}

// exchange sends a datagram and returns the answer.
func exchange(conn net.Conn, text string, patience time.Duration) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	buf := make([]byte, 65536)
	n, err := conn.Read(buf)
	return string(buf[:n]), err
}

// whose tells whose address an endpoint saw.
func (c client) whose(seen string, own netip.AddrPort, node []netip.Addr) string {
	s, err := netip.ParseAddrPort(seen)
	switch {
	case err != nil:
		return fmt.Sprintf("%q", seen)
	case slices.Contains(node, s.Addr()) || s.Addr().IsLoopback():
		return "node"
	case s.Addr() == own.Addr():
		return "client"
	}
	return s.Addr().String()
}

// from returns the source address of a connection to a destination.
func (c client) from(t *testing.T, to netip.AddrPort) netip.Addr {
	t.Helper()
	if c.bind != nil {
		return netns.Pick(c.bind, to.Addr())
	}
	conn, err := c.Dial("udp", to.String()) // sends nothing
	must.OKf(t, err, "%s has no route to %s", c.name, to)
	defer conn.Close()
	return netip.MustParseAddrPort(conn.LocalAddr().String()).Addr()
}

// question is a question to explain.
type question struct {
	Protocol string `json:"protocol"`
	From     string `json:"from"`
	To       string `json:"to"`
}

// answer is explain's answer.
type answer struct {
	Verdict    string   `json:"verdict"`
	Service    string   `json:"service"`
	Address    string   `json:"address"`
	Policy     string   `json:"policy"`
	Candidates []string `json:"candidates"`
	Source     string   `json:"source"`
	Rules      []string `json:"rules"`
	Error      string   `json:"error"`
}

// explain asks `sluice explain` with the proxy's flags, and names all addresses of
// the node.
func (p *proxy) explain(t *testing.T, node []netip.Addr, questions []question, flags ...string) []answer {
	t.Helper()
	var in bytes.Buffer
	for _, q := range questions {
		must.OK(t, json.NewEncoder(&in).Encode(q))
	}
	args := append([]string{"explain", "--manifests", p.manifests, "--hostname-override", "node", "--service-cidr", serviceCIDRs, "-f", "-"}, flags...)
	for _, a := range node {
		args = append(args, "--node-ip", a.String())
	}
	cmd := p.node.Command(t, built(t), args...)
	var complaints bytes.Buffer
	cmd.Stdin, cmd.Stderr = &in, &complaints
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("sluice %s: %v\n%s", strings.Join(args, " "), err, complaints.String())
	}
	var answers []answer
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		var a answer
		must.OKf(t, json.Unmarshal(lines.Bytes(), &a), "explain said %q", lines.Text())
		answers = append(answers, a)
	}
	must.Equalf(t, len(answers), len(questions), "answers of explain")
	return answers
}
