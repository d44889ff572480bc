package kubeproxyconfig

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
)

// used are the fields that mean something here; all below one of them do too.
var used = []string{
	"apiVersion", "kind", "bindAddress", "bindAddressHardFail", "healthzBindAddress", "metricsBindAddress", "enableProfiling",
	"hostnameOverride", "clientConnection", "clusterCIDR", "detectLocalMode", "detectLocal", "nodePortAddresses", "mode",
	"iptables.masqueradeAll", "iptables.localhostNodePorts", "iptables.minSyncPeriod",
	"nftables.masqueradeAll", "nftables.minSyncPeriod", "ipvs.minSyncPeriod", "oomScoreAdj",
	"conntrack.udpTimeout", "conntrack.udpStreamTimeout",
	"logging.format", "logging.verbosity", "featureGates.AllowServiceExternalIPs",
}

// Ignored returns the fields, sorted, that the file sets to something else than
// kube-proxy's default and that have no meaning here.
func (f *File) Ignored() []string {
	given, empty := tree(f.Given), tree(&Config{})
	usual := tree(Default())
	var out []string
	walk("", given, func(path string, value any) {
		if slices.ContainsFunc(used, func(u string) bool { return path == u || strings.HasPrefix(path, u+".") }) {
			return
		}
		if reflect.DeepEqual(value, at(empty, path)) || reflect.DeepEqual(value, at(usual, path)) || isZero(value) {
			return
		}
		out = append(out, path)
	})
	slices.Sort(out)
	return out
}

// tree returns a configuration as JSON has it.
func tree(c *Config) map[string]any {
	text, err := json.Marshal(c)
	if err != nil {
		return nil // not possible with this type
	}
	out := map[string]any{}
	_ = json.Unmarshal(text, &out) // our own text
	return out
}

func walk(prefix string, m map[string]any, leaf func(path string, value any)) {
	for k, value := range m {
		path := k
		if prefix != "" {
			path = prefix + "." + k
		}
		if below, ok := value.(map[string]any); ok {
			walk(path, below, leaf)
		} else {
			leaf(path, value)
		}
	}
}

func at(m map[string]any, path string) any {
	var value any = m
	for _, k := range strings.Split(path, ".") {
		below, ok := value.(map[string]any)
		if !ok {
			return nil
		}
		value = below[k]
	}
	return value
}

// isZero reports whether a value of JSON says nothing: "0s" is what an unset
// duration looks like.
func isZero(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case string:
		return v == "" || v == "0s"
	case []any:
		return len(v) == 0
	}
	return reflect.ValueOf(value).IsZero()
}
