package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// The Services of kubelet's own test of its variables (TestFromServices in pkg/kubelet/envvars),
// and one of another namespace.
const envServices = `apiVersion: v1
kind: Service
metadata: {name: foo-bar}
spec: {clusterIP: 10.96.1.1, ports: [{port: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: abc-123}
spec: {clusterIP: 10.96.1.2, ports: [{name: u-d-p, port: 8081, protocol: UDP}, {name: t-c-p, port: 8081}]}
---
apiVersion: v1
kind: Service
metadata: {name: super-ipv6}
spec: {clusterIP: "fd00:10:96::7", ports: [{port: 8084}]}
---
apiVersion: v1
kind: Service
metadata: {name: none}
spec: {clusterIP: None, ports: [{port: 8085}]}
---
apiVersion: v1
kind: Service
metadata: {name: redis-master, namespace: shop}
spec: {clusterIP: 10.96.1.3, ports: [{port: 6379}]}
`

const envWant = `ABC_123_SERVICE_HOST=10.96.1.2
ABC_123_SERVICE_PORT=8081
ABC_123_SERVICE_PORT_U_D_P=8081
ABC_123_SERVICE_PORT_T_C_P=8081
ABC_123_PORT=udp://10.96.1.2:8081
ABC_123_PORT_8081_UDP=udp://10.96.1.2:8081
ABC_123_PORT_8081_UDP_PROTO=udp
ABC_123_PORT_8081_UDP_PORT=8081
ABC_123_PORT_8081_UDP_ADDR=10.96.1.2
ABC_123_PORT_8081_TCP=tcp://10.96.1.2:8081
ABC_123_PORT_8081_TCP_PROTO=tcp
ABC_123_PORT_8081_TCP_PORT=8081
ABC_123_PORT_8081_TCP_ADDR=10.96.1.2
FOO_BAR_SERVICE_HOST=10.96.1.1
FOO_BAR_SERVICE_PORT=8080
FOO_BAR_PORT=tcp://10.96.1.1:8080
FOO_BAR_PORT_8080_TCP=tcp://10.96.1.1:8080
FOO_BAR_PORT_8080_TCP_PROTO=tcp
FOO_BAR_PORT_8080_TCP_PORT=8080
FOO_BAR_PORT_8080_TCP_ADDR=10.96.1.1
SUPER_IPV6_SERVICE_HOST=fd00:10:96::7
SUPER_IPV6_SERVICE_PORT=8084
SUPER_IPV6_PORT=tcp://[fd00:10:96::7]:8084
SUPER_IPV6_PORT_8084_TCP=tcp://[fd00:10:96::7]:8084
SUPER_IPV6_PORT_8084_TCP_PROTO=tcp
SUPER_IPV6_PORT_8084_TCP_PORT=8084
SUPER_IPV6_PORT_8084_TCP_ADDR=fd00:10:96::7
`

const hostsWant = `10.96.1.1 foo-bar.default.svc.example.org foo-bar.default.svc foo-bar.default foo-bar
10.96.1.2 abc-123.default.svc.example.org abc-123.default.svc abc-123.default abc-123
10.96.1.3 redis-master.shop.svc.example.org redis-master.shop.svc redis-master.shop
fd00:10:96::7 super-ipv6.default.svc.example.org super-ipv6.default.svc super-ipv6.default super-ipv6
`

// TestHostsAndEnv prints names and variables of Services with fixed addresses.
func TestHostsAndEnv(t *testing.T) {
	dir := t.TempDir()
	must.OK(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(envServices), 0o600))
	for _, row := range []struct{ args, want string }{
		{"env " + dir, envWant},
		{"env -n shop " + dir + "/a.yaml", "REDIS_MASTER_SERVICE_HOST=10.96.1.3\n"},
		{"hosts --dns-zone example.org " + dir, hostsWant},
	} {
		got, _, err := runCommand("", strings.Fields(row.args)...)
		if err != nil || !strings.HasPrefix(got, row.want) || len(got) > len(row.want) && !strings.Contains(row.args, "shop") {
			t.Errorf("%s: %v\n%s\nwant\n%s", row.args, err, got, row.want)
		}
	}
	must.OK(t, os.WriteFile(filepath.Join(dir, "b.yaml"), []byte("apiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec: {ports: [{port: 0}]}\n"), 0o600))
	for _, args := range []string{"env", "hosts", "env " + dir, "hosts " + dir, "env -n A " + dir, "hosts --dns-zone a..b " + dir, "hosts " + dir + "/none"} {
		if got, _, err := runCommand("", strings.Fields(args)...); err == nil || got != "" {
			t.Errorf("%s: %v %s", args, err, got)
		}
	}
}
