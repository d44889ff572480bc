package dev

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Env returns the variables that a kubelet gives to pods of a namespace, as KEY=value: for
// each Service with a cluster IP its host and ports, and the same in the form of Docker's
// links. The order is that of the Services and of their ports.
func Env(services []*corev1.Service, namespace string) (vars []string) {
	add := func(key, format string, args ...any) { vars = append(vars, key+"="+fmt.Sprintf(format, args...)) }
	for _, s := range services {
		host := s.Spec.ClusterIP
		if s.Namespace != namespace || host == "" || host == corev1.ClusterIPNone || len(s.Spec.Ports) == 0 {
			continue
		}
		name := variable(s.Name)
		add(name+"_SERVICE_HOST", "%s", host)
		add(name+"_SERVICE_PORT", "%d", s.Spec.Ports[0].Port)
		for _, p := range s.Spec.Ports {
			if p.Name != "" {
				add(name+"_SERVICE_PORT_"+variable(p.Name), "%d", p.Port)
			}
		}
		for i, p := range s.Spec.Ports {
			protocol := strings.ToLower(string(p.Protocol))
			url := protocol + "://" + net.JoinHostPort(host, strconv.Itoa(int(p.Port)))
			if i == 0 {
				add(name+"_PORT", "%s", url)
			}
			prefix := fmt.Sprintf("%s_PORT_%d_%s", name, p.Port, p.Protocol)
			add(prefix, "%s", url)
			add(prefix+"_PROTO", "%s", protocol)
			add(prefix+"_PORT", "%d", p.Port)
			add(prefix+"_ADDR", "%s", host)
		}
	}
	return vars
}

// variable returns a name as a part of a variable's.
func variable(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }
