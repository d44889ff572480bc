package quic

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/proxy"
	"github.com/sluice-proxy/sluice/test/wait"
)

// server counts the connections that it accepted.
type server struct{ accepted atomic.Int64 }

// quicProxy is a proxy with one Service.
type quicProxy struct {
	*proxy.Proxy
	t *testing.T
}

// start runs the proxy until the test ends.
func start(t *testing.T, node *netns.Host, endpoints ...netip.Addr) *quicProxy {
	t.Helper()
	p := &quicProxy{proxy.New(t, node), t}
	p.write(endpoints)
	flags := []string{"--access-log", "off", "--datapath=relay"} // the last one counts
	p.Start(nil, append(flags, strings.Fields(os.Getenv("SLUICE_TEST_FLAGS"))...)...)
	return p
}

// kernelFlows reports whether the tests run with them.
func kernelFlows() bool {
	return strings.Contains(os.Getenv("SLUICE_TEST_FLAGS"), "--datapath=kernel")
}

// put changes the endpoints and waits until the change is in force. What comes with no
// change, such as the start of kernel flows, puts the old endpoints in force once more: so
// the change has to have been read first.
func (p *quicProxy) put(endpoints ...netip.Addr) {
	p.t.Helper()
	began := time.Now()
	p.write(endpoints)
	wait.For(p.t, "the change is in force", time.Minute, func() error {
		read, err := p.Metric("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", `ip_family="IPv4"`)
		if err != nil {
			return err
		}
		applied, err := p.Metric("sluice_config_applied_timestamp_seconds")
		if err == nil && (read < float64(began.UnixNano())/1e9 || applied < read) {
			err = fmt.Errorf("read at %f, applied at %f\n%s", read, applied, p.Log.String())
		}
		return err
	})
}

// end stops the proxy.
func (p *quicProxy) end() {
	p.t.Helper()
	decided, err := p.Metric("sluice_flows_decided_total")
	if err != nil || kernelFlows() != (decided > 0) {
		p.t.Errorf("the kernel forwards %v sessions, %v", decided, err)
	}
	p.Stop()
}

// write replaces the Service's manifest atomically.
func (p *quicProxy) write(endpoints []netip.Addr) {
	var list strings.Builder
	for _, e := range endpoints {
		fmt.Fprintf(&list, "- {addresses: [%q], nodeName: elsewhere}\n", e)
	}
	p.Write(fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: quic, namespace: default}
spec:
  clusterIP: %[1]s
  clusterIPs: [%[1]s]
  ipFamilies: [IPv4]
  ports: [{name: quic, port: %[2]d, targetPort: %[3]d, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: quic-4, namespace: default, labels: {kubernetes.io/service-name: quic}}
addressType: IPv4
ports: [{name: quic, port: %[3]d, protocol: UDP}]
endpoints:
%[4]s`, vip, port, target, list.String()))
}
