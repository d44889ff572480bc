package manifests

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// placedService is a Service in force, and where it is.
type placedService struct {
	claim claim
	key   objectKey
	*corev1.Service
}

// lint finds what Kubernetes allows and hardly anybody wants.
func (i *inspector) lint() {
	services := i.services()
	for _, s := range services {
		i.lintService(s)
	}
	for _, w := range i.workloads {
		i.lintWorkload(w, services)
	}
}

// warnAt warns of a field of a Service.
func (i *inspector) warnAt(s placedService, field, format string, args ...any) {
	i.warn(s.claim.file, lineOf(s.claim.node, field), s.key.String(), field+": "+fmt.Sprintf(format, args...))
}

func (i *inspector) lintService(s placedService) {
	spec := &s.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		if _, err := netip.ParseAddr(spec.ExternalName); err == nil {
			i.warnAt(s, "spec.externalName", "%s is an address, and DNS has names only: write a Service without selector, and an EndpointSlice with the address", spec.ExternalName)
		}
		return
	}
	for j, text := range s.Spec.ClusterIPs {
		a, ok := service.ParseAddr(text)
		ranges := i.ranges()
		if !ok || slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) }) {
			continue
		}
		field := "spec.clusterIP"
		if j > 0 {
			field = fmt.Sprintf("spec.clusterIPs[%d]", j)
		}
		i.warnAt(s, field, "%s is not in the range of cluster IPs, %s: leave it out, then the Service gets one", a, commaText(ranges))
	}
	for j := range spec.Ports {
		if n := spec.Ports[j].NodePort; n != 0 && (n < 30000 || n > 32767) {
			i.warnAt(s, fmt.Sprintf("spec.ports[%d].nodePort", j), "%d is not of 30000 to 32767, which API servers give by default", n)
		}
	}
	pods := i.selected(s)
	i.lintSelector(s, pods)
	for j := range spec.Ports {
		i.lintTarget(s, j, pods)
	}
	i.lintEndpoints(s, pods)
}

func commaText[T fmt.Stringer](list []T) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, v.String())
	}
	return strings.Join(parts, ", ")
}

// selected returns the workloads whose pods a Service selects.
func (i *inspector) selected(s placedService) (list []placedWorkload) {
	for _, w := range i.workloads {
		if w.namespace == s.Namespace && selects(s.Spec.Selector, w.labels) {
			list = append(list, w)
		}
	}
	return list
}

// lintSelector warns of a selector that picks no pods, if the manifests have some. A Service
// that names its endpoints itself needs none, but should not miss those of its own name.
func (i *inspector) lintSelector(s placedService, pods []placedWorkload) {
	if len(s.Spec.Selector) == 0 || len(pods) > 0 || len(i.workloads) == 0 {
		return
	}
	if _, named := s.Annotations["sluice.dev/"+endpointsAnnotation]; named &&
		!slices.ContainsFunc(i.workloads, func(w placedWorkload) bool { return strings.HasSuffix(w.name, "/"+s.Name) }) {
		return
	}
	hint := ""
	for _, w := range i.workloads {
		switch wrong := differences(s.Spec.Selector, w.labels); {
		case w.namespace != s.Namespace && wrong == 0:
			hint = fmt.Sprintf("; %s has them, in another namespace", w.name)
		case w.namespace == s.Namespace && len(w.labels) > 0 && hint == "" && wrong <= 1:
			hint = fmt.Sprintf("; those of %s are %s", w.name, labelText(w.labels))
		}
	}
	i.warnAt(s, "spec.selector", "no pod of the manifests has the labels %s%s", labelText(s.Spec.Selector), hint)
}

// differences counts the labels of a selector that others lack.
func differences(selector, labels map[string]string) (n int) {
	for key, value := range selector {
		if has, ok := labels[key]; !ok || has != value {
			n++
		}
	}
	return n
}

// lintTarget warns of a target port that no selected pod has.
func (i *inspector) lintTarget(s placedService, j int, pods []placedWorkload) {
	p := &s.Spec.Ports[j]
	field := fmt.Sprintf("spec.ports[%d].targetPort", j)
	named := p.TargetPort.Type == intstr.String
	var names, numbers []string
	for _, w := range pods {
		for _, c := range w.ports {
			if named && c.name == p.TargetPort.StrVal || !named && c.number == int(p.TargetPort.IntVal) {
				if c.protocol == string(p.Protocol) {
					return
				}
				i.warnAt(s, fmt.Sprintf("spec.ports[%d].protocol", j), "is %s, and the container port of %s is %s", p.Protocol, w.name, c.protocol)
				return
			}
			numbers = append(numbers, fmt.Sprint(c.number))
			if c.name != "" {
				names = append(names, c.name)
			}
		}
	}
	switch {
	case len(pods) == 0:
	case named:
		i.warnAt(s, field, "no container of %s has a port %q%s", pods[0].name, p.TargetPort.StrVal, nearest.Hint(p.TargetPort.StrVal, 3, slices.Values(names)))
	case len(numbers) > 0:
		i.warnAt(s, field, "no container of %s says that it listens on %d, only on %s", pods[0].name, p.TargetPort.IntVal, strings.Join(slices.Compact(numbers), ", "))
	}
}

// lintEndpoints compares a Service with what serves it: slices, Endpoints or the annotation.
func (i *inspector) lintEndpoints(s placedService, pods []placedWorkload) {
	var slicesOf []*discoveryv1.EndpointSlice
	for k := range i.catalog.belonging.members[s.key.Name] {
		if slice, ok := i.catalog.inForce[k].(*discoveryv1.EndpointSlice); ok {
			slicesOf = append(slicesOf, slice)
		}
	}
	for _, made := range i.catalog.mirrored[s.key.Name] {
		slicesOf = append(slicesOf, made.(*discoveryv1.EndpointSlice))
	}
	slices.SortFunc(slicesOf, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	count, ready := 0, 0
	for _, slice := range slicesOf {
		for _, e := range slice.Endpoints {
			count++
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				ready++
			}
		}
	}
	switch {
	case count == 0:
		who := ""
		if len(pods) > 0 {
			who = fmt.Sprintf("; %s is not started here", pods[0].name)
		}
		i.warn(s.claim.file, s.claim.line, s.key.String(), fmt.Sprintf("nothing serves it%s: say which process does, by the annotation sluice.dev/endpoints: 127.0.0.1:%s", who, likelyPort(s, pods)))
		return
	case ready == 0 && !s.Spec.PublishNotReadyAddresses:
		i.warn(s.claim.file, s.claim.line, s.key.String(), fmt.Sprintf("none of its endpoints is ready (there are %d)", count))
	}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		return
	}
	if !slices.ContainsFunc(slicesOf, func(slice *discoveryv1.EndpointSlice) bool { return hasFamily(s.Service, slice.AddressType) }) {
		i.warnAt(s, "spec", "its cluster IP is %s, and all its endpoints are %s: write ipFamilies: [%s]", s.Spec.ClusterIP, slicesOf[0].AddressType, slicesOf[0].AddressType)
		return
	}
	for j := range s.Spec.Ports {
		i.lintServed(s, j, slicesOf)
	}
}

// lintServed warns of a port that no slice has, and of a slice with another number than the
// target port's.
func (i *inspector) lintServed(s placedService, j int, list []*discoveryv1.EndpointSlice) {
	p := &s.Spec.Ports[j]
	served := false
	for _, slice := range list {
		for _, has := range slice.Ports {
			if *has.Name != p.Name || *has.Protocol != p.Protocol || has.Port == nil {
				continue
			}
			served = true
			asked := slice.Labels[discoveryv1.LabelManagedBy] == service.AskedManager
			if p.TargetPort.Type == intstr.Int && *has.Port != p.TargetPort.IntVal && !asked {
				i.warnAt(s, fmt.Sprintf("spec.ports[%d].targetPort", j), "is %d, but its endpoints have %d, which counts", p.TargetPort.IntVal, *has.Port)
			}
		}
	}
	if !served {
		i.warnAt(s, fmt.Sprintf("spec.ports[%d]", j), "none of its endpoints has the port %s: connections to %d are refused", portText(p.Name, p.Protocol), p.Port)
	}
}

// likelyPort returns the port that a process of a Service probably has.
func likelyPort(s placedService, pods []placedWorkload) string {
	if len(s.Spec.Ports) == 0 {
		return "3000"
	}
	target := s.Spec.Ports[0].TargetPort
	for _, w := range pods {
		for _, c := range w.ports {
			if target.Type == intstr.String && c.name == target.StrVal {
				return fmt.Sprint(c.number)
			}
		}
	}
	if target.Type == intstr.Int && target.IntVal != s.Spec.Ports[0].Port {
		return target.String()
	}
	return "3000"
}

// lintWorkload warns of pods that no Service leads to, and of labels and names that do not
// belong together.
func (i *inspector) lintWorkload(w placedWorkload, services []placedService) {
	warn := func(line int, format string, args ...any) {
		i.warn(w.file, line, w.name, fmt.Sprintf(format, args...))
	}
	if len(w.selector) > 0 && !selects(w.selector, w.labels) {
		i.findings = append(i.findings, finding{file: w.file, line: w.lines.selector, object: w.name,
			text: fmt.Sprintf("spec.selector: its own pods have other labels, %s: API servers refuse that", orNone(labelText(w.labels)))})
	}
	if w.governing != "" {
		svc, ok := i.catalog.inForce[objectKey{kindService, w.serviceName()}].(*corev1.Service)
		switch {
		case !ok:
			warn(w.lines.governing, "spec.serviceName: the Service %s does not exist, so its pods have no names%s", w.serviceName(), i.catalog.similar(w.serviceName()))
		case svc.Spec.ClusterIP != corev1.ClusterIPNone:
			warn(w.lines.governing, "spec.serviceName: the Service %s is not headless (clusterIP: None), so its pods have no names", w.serviceName())
		}
	}
	if len(w.ports) == 0 && len(services) > 0 {
		return // it may have nothing to serve
	}
	if !slices.ContainsFunc(services, func(s placedService) bool { return s.Namespace == w.namespace && selects(s.Spec.Selector, w.labels) }) {
		warn(w.line, "no Service selects its pods (labels %s), so no name leads to them: write a Service with that selector", orNone(labelText(w.labels)))
	}
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
