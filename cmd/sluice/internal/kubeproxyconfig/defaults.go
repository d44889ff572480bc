package kubeproxyconfig

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// The ports of /healthz and of /metrics.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// SetDefaults fills in what a file leaves out, as kube-proxy does.
func SetDefaults(c *Config) {
	setString(&c.BindAddress, "0.0.0.0")
	anywhere, loopback := "0.0.0.0", "127.0.0.1"
	if a, err := netip.ParseAddr(c.BindAddress); err == nil && a.Unmap().Is6() {
		anywhere, loopback = "::", "::1"
	}
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, anywhere, HealthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, loopback, MetricsPort)
	setPointer(&c.OOMScoreAdj, -999)
	if c.Mode == "" {
		c.Mode = "iptables"
	}
	if c.DetectLocalMode == "" {
		c.DetectLocalMode = "ClusterCIDR"
	}

	setDuration(&c.IPTables.SyncPeriod, 30*time.Second)
	setDuration(&c.IPTables.MinSyncPeriod, time.Second)
	setPointer(&c.IPTables.LocalhostNodePorts, true)
	setPointer(&c.IPTables.MasqueradeBit, 14)
	setDuration(&c.IPVS.SyncPeriod, 30*time.Second)
	setDuration(&c.NFTables.SyncPeriod, 30*time.Second)
	setDuration(&c.NFTables.MinSyncPeriod, time.Second)
	setPointer(&c.NFTables.MasqueradeBit, 14)

	setPointer(&c.Conntrack.MaxPerCore, 32*1024)
	setPointer(&c.Conntrack.Min, 128*1024)
	setPointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	setPointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	setDuration(&c.ConfigSyncPeriod, 15*time.Minute)

	setString(&c.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	if c.ClientConnection.QPS == 0 {
		c.ClientConnection.QPS = 5
	}
	if c.ClientConnection.Burst == 0 {
		c.ClientConnection.Burst = 10
	}
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	setString(&c.Logging.Format, "text")
	if c.Logging.FlushFrequency.Duration.Duration == 0 {
		c.Logging.FlushFrequency.Duration.Duration = 5 * time.Second
		c.Logging.FlushFrequency.SerializeAsString = true
	}
}

func setString(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

func setDuration(d *metav1.Duration, value time.Duration) {
	if d.Duration == 0 {
		d.Duration = value
	}
}

func setPointer[T any](p **T, value T) {
	if *p == nil {
		*p = ptr.To(value)
	}
}

// withPort completes an address of a server: nothing means the default address,
// and an address alone gets the default port.
func withPort(address, host string, port int) string {
	if address == "" {
		return net.JoinHostPort(host, strconv.Itoa(port))
	}
	if _, err := netip.ParseAddr(address); err == nil {
		return net.JoinHostPort(address, strconv.Itoa(port))
	}
	return address
}
