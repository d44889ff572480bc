package manifests

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-proxy/sluice/service"
)

// workload is what Inspect reads of an object that has pods. Its other fields are not
// checked.
type workload struct {
	name      string // "Deployment shop/web"
	namespace string
	line      int
	labels    map[string]string // of its pods
	ports     []containerPort
	governing string // the serviceName of a StatefulSet
	selector  map[string]string
	lines     struct{ selector, governing int }
}

// containerPort is a port that a container says that it listens on.
type containerPort struct {
	name, protocol string
	number         int
}

// templates says where each kind of object with pods describes them.
var templates = map[string]string{
	"Pod": "", "ReplicationController": "spec.template",
	"Deployment": "spec.template", "StatefulSet": "spec.template", "DaemonSet": "spec.template", "ReplicaSet": "spec.template",
}

// workloadOf reads an object with pods; nil if its kind has none.
func workloadOf(n *yaml.Node, kindName string) *workload {
	path, ok := templates[kindName]
	if !ok {
		return nil
	}
	w := &workload{line: n.Line, namespace: "default"}
	if ns := fieldAt(n, "metadata", "namespace"); ns != nil && ns.Value != "" {
		w.namespace = ns.Value
	}
	w.name = fmt.Sprintf("%s %s/", kindName, w.namespace)
	if name := fieldAt(n, "metadata", "name"); name != nil {
		w.name += name.Value
	}
	pod := n
	if path != "" {
		pod = fieldAt(n, strings.Split(path, ".")...)
		w.selector = labelsAt(n, "spec", "selector", "matchLabels")
		w.lines.selector = lineOf(n, "spec.selector")
	}
	w.labels = labelsAt(pod, "metadata", "labels")
	if name := fieldAt(n, "spec", "serviceName"); kindName == "StatefulSet" && name != nil {
		w.governing, w.lines.governing = name.Value, name.Line
	}
	if containers := fieldAt(pod, "spec", "containers"); containers != nil {
		for _, c := range containers.Content {
			w.addPorts(c)
		}
	}
	return w
}

// addPorts adds the ports of a container.
func (w *workload) addPorts(container *yaml.Node) {
	ports := fieldAt(container, "ports")
	if ports == nil {
		return
	}
	for _, p := range ports.Content {
		port := containerPort{protocol: "TCP"}
		if v := fieldAt(p, "name"); v != nil {
			port.name = v.Value
		}
		if v := fieldAt(p, "protocol"); v != nil {
			port.protocol = v.Value
		}
		if v := fieldAt(p, "containerPort"); v != nil {
			port.number, _ = strconv.Atoi(v.Value) // 0 is no port
		}
		w.ports = append(w.ports, port)
	}
}

// fieldAt returns what the keys lead to, or nil. n may be nil.
func fieldAt(n *yaml.Node, keys ...string) *yaml.Node {
	for _, key := range keys {
		if n == nil {
			return nil
		}
		n = field(n, key)
	}
	return n
}

// labelsAt reads a mapping of texts.
func labelsAt(n *yaml.Node, keys ...string) map[string]string {
	n = fieldAt(n, keys...)
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	all := make(map[string]string, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		all[n.Content[i].Value] = follow(n.Content[i+1]).Value
	}
	return all
}

// selects reports whether labels have all of a selector's.
func selects(selector, labels map[string]string) bool {
	for key, value := range selector {
		if has, ok := labels[key]; !ok || has != value {
			return false
		}
	}
	return len(selector) > 0
}

// labelText returns "app=web,tier=front".
func labelText(labels map[string]string) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		parts = append(parts, key+"="+labels[key])
	}
	return strings.Join(parts, ",")
}

// serviceName returns the name of the Service that governs a StatefulSet.
func (w *workload) serviceName() service.Name {
	return service.Name{Namespace: w.namespace, Name: w.governing}
}
