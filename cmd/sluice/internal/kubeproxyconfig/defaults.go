package kubeproxyconfig

import (
	"cmp"
	"net"
	"net/netip"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The ports of /healthz and of /metrics.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// SetDefaults fills in what a file leaves out, as kube-proxy does.
func SetDefaults(c *Config) {
	c.BindAddress = cmp.Or(c.BindAddress, "0.0.0.0")
	anywhere, loopback := "0.0.0.0", "127.0.0.1"
	if a, err := netip.ParseAddr(c.BindAddress); err == nil && a.Unmap().Is6() {
		anywhere, loopback = "::", "::1"
	}
	c.HealthzBindAddress = WithPort(c.HealthzBindAddress, anywhere, HealthzPort)
	c.MetricsBindAddress = WithPort(c.MetricsBindAddress, loopback, MetricsPort)
	setPointer(&c.OOMScoreAdj, -999)
	c.Mode = cmp.Or(c.Mode, "iptables")
	c.DetectLocalMode = cmp.Or(c.DetectLocalMode, "ClusterCIDR")

	c.IPTables.SyncPeriod.Duration = cmp.Or(c.IPTables.SyncPeriod.Duration, 30*time.Second)
	c.IPTables.MinSyncPeriod.Duration = cmp.Or(c.IPTables.MinSyncPeriod.Duration, time.Second)
	setPointer(&c.IPTables.LocalhostNodePorts, true)
	setPointer(&c.IPTables.MasqueradeBit, 14)
	c.IPVS.SyncPeriod.Duration = cmp.Or(c.IPVS.SyncPeriod.Duration, 30*time.Second)
	c.NFTables.SyncPeriod.Duration = cmp.Or(c.NFTables.SyncPeriod.Duration, 30*time.Second)
	c.NFTables.MinSyncPeriod.Duration = cmp.Or(c.NFTables.MinSyncPeriod.Duration, time.Second)
	setPointer(&c.NFTables.MasqueradeBit, 14)

	setPointer(&c.Conntrack.MaxPerCore, 32*1024)
	setPointer(&c.Conntrack.Min, 128*1024)
	setPointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	setPointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	c.ConfigSyncPeriod.Duration = cmp.Or(c.ConfigSyncPeriod.Duration, 15*time.Minute)

	c.ClientConnection.ContentType = cmp.Or(c.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	c.ClientConnection.QPS = cmp.Or(c.ClientConnection.QPS, 5)
	c.ClientConnection.Burst = cmp.Or(c.ClientConnection.Burst, 10)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	c.Logging.Format = cmp.Or(c.Logging.Format, "text")
	if c.Logging.FlushFrequency.Duration.Duration == 0 {
		c.Logging.FlushFrequency.Duration.Duration = 5 * time.Second
		c.Logging.FlushFrequency.SerializeAsString = true
	}
}

func setPointer[T any](p **T, value T) {
	if *p == nil {
		*p = new(value)
	}
}

// WithPort completes an address of a server: nothing means the default address,
// and an address alone gets the default port.
func WithPort(address, host string, port int) string {
	if address == "" {
		return net.JoinHostPort(host, strconv.Itoa(port))
	}
	if _, err := netip.ParseAddr(address); err == nil {
		return net.JoinHostPort(address, strconv.Itoa(port))
	}
	return address
}
