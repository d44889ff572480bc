package manifests

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// clusterDump writes services with a slice of three endpoints each, as kubectl
// prints them, to 100 files.
func clusterDump(t testing.TB, dir string, services int) (bytes int) {
	const files = 100
	for f := range files {
		var b strings.Builder
		b.WriteString("apiVersion: v1\nitems:\n")
		for i := f; i < services; i += files {
			fmt.Fprintf(&b, `- apiVersion: v1
  kind: Service
  metadata:
    annotations:
      meta.helm.sh/release-name: app-%[1]d
      meta.helm.sh/release-namespace: team-%[2]d
    creationTimestamp: "2026-03-01T09:12:44Z"
    labels:
      app.kubernetes.io/instance: app-%[1]d
      app.kubernetes.io/managed-by: Helm
      app.kubernetes.io/name: app
      helm.sh/chart: app-1.2.3
    name: app-%[1]d
    namespace: team-%[2]d
    resourceVersion: "%[1]d"
    uid: 3f1c9a52-7d0e-4b0c-9a55-%012[1]d
  spec:
    clusterIP: 10.%[3]d.%[4]d.%[5]d
    clusterIPs:
    - 10.%[3]d.%[4]d.%[5]d
    internalTrafficPolicy: Cluster
    ipFamilies:
    - IPv4
    ipFamilyPolicy: SingleStack
    ports:
    - name: http
      port: 80
      protocol: TCP
      targetPort: http
    selector:
      app.kubernetes.io/instance: app-%[1]d
    sessionAffinity: None
    type: ClusterIP
  status:
    loadBalancer: {}
- addressType: IPv4
  apiVersion: discovery.k8s.io/v1
`, i, i%50, 100+i/65536, i/256%256, i%256)
			b.WriteString("  endpoints:\n")
			for e := range 3 {
				fmt.Fprintf(&b, `  - addresses:
    - 10.%d.%d.%d
    conditions:
      ready: true
      serving: true
      terminating: false
    nodeName: node-%d
    targetRef:
      kind: Pod
      name: app-%d-7d9c8b6f5-%d
      namespace: team-%d
      uid: 5b2c9a52-7d0e-4b0c-9a55-%012d
    zone: zone-%d
`, 200+e, i/256%256, i%256, e, i, e, i%50, i*3+e, e)
			}
			fmt.Fprintf(&b, `  kind: EndpointSlice
  metadata:
    annotations:
      endpoints.kubernetes.io/last-change-trigger-time: "2026-03-01T09:12:50Z"
    creationTimestamp: "2026-03-01T09:12:44Z"
    generateName: app-%[1]d-
    generation: 3
    labels:
      endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io
      kubernetes.io/service-name: app-%[1]d
    name: app-%[1]d-x7k2p
    namespace: team-%[2]d
    ownerReferences:
    - apiVersion: v1
      blockOwnerDeletion: true
      controller: true
      kind: Service
      name: app-%[1]d
      uid: 3f1c9a52-7d0e-4b0c-9a55-%012[1]d
    resourceVersion: "%[1]d"
    uid: 9a1c9a52-7d0e-4b0c-9a55-%012[1]d
  ports:
  - name: http
    port: 8080
    protocol: TCP
`, i, i%50)
		}
		b.WriteString("kind: List\nmetadata:\n  resourceVersion: \"\"\n")
		write(t, filepath.Join(dir, fmt.Sprintf("dump-%03d.yaml", f)), b.String())
		bytes += b.Len()
	}
	return bytes
}

// How long a start takes, and how long a change of one file among many.
func BenchmarkLoad10000Services100Files(b *testing.B) {
	dir := b.TempDir()
	bytes := clusterDump(b, dir, 10_000)
	b.SetBytes(int64(bytes))
	loads, before := 0, cpuTime(b)
	for b.Loop() {
		loads++
		ctx, cancel := context.WithCancel(context.Background())
		must.OK(b, New(dir, Options{}).Run(ctx, func(c service.Change) {
			if len(c.Services) != 10_000 || len(c.EndpointSlices) != 10_000 {
				b.Errorf("%d services, %d slices", len(c.Services), len(c.EndpointSlices))
			}
			cancel()
		}))
	}
	b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(loads), "cpu-ms/op")
}

// cpuTime is what this process has used of its processors: on a busy machine it
// says more than the clock.
func cpuTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	must.OK(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkChangeAmong10000Services100Files(b *testing.B) {
	dir := b.TempDir()
	clusterDump(b, dir, 10_000)
	bench := start(b, dir)
	i := 0
	var sum time.Duration
	for b.Loop() {
		i++
		ip := fmt.Sprintf("10.1.%d.%d", i/250%250+1, i%250+1)
		from := time.Now()
		write(b, filepath.Join(dir, "one.yaml"), svc("one", ip))
		bench.until("the change", func() bool { return bench.objects["Service default/one"] == ip })
		sum += time.Since(from)
	}
	b.ReportMetric(float64(sum.Milliseconds())/float64(i), "ms/change")
}
