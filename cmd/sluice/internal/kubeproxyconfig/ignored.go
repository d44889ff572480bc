package kubeproxyconfig

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// used are the fields that mean something here; all below one of them do too.
var used = []string{
	"apiVersion", "kind", "bindAddress", "bindAddressHardFail", "healthzBindAddress", "metricsBindAddress", "enableProfiling",
	"hostnameOverride", "clientConnection", "clusterCIDR", "detectLocalMode", "detectLocal", "nodePortAddresses", "mode",
	"iptables.masqueradeAll", "iptables.localhostNodePorts", "iptables.minSyncPeriod",
	"nftables.masqueradeAll", "nftables.minSyncPeriod", "ipvs.minSyncPeriod", "ipvs.scheduler", "oomScoreAdj",
	"conntrack",
	"logging.format", "logging.verbosity", "featureGates.AllowServiceExternalIPs",
}

// Ignored returns the fields, sorted, that the file sets to something else than
// kube-proxy's default and that have no meaning here.
func (f *File) Ignored() []string {
	empty, usual := leaves(&Config{}), leaves(Default())
	var out []string
	for path, value := range leaves(f.Given) {
		switch {
		case isUsed(path):
		case reflect.DeepEqual(value, empty[path]), reflect.DeepEqual(value, usual[path]), isZero(value):
		default:
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out
}

// leaves returns the values of a configuration as JSON has them, by their paths.
func leaves(c *Config) map[string]any {
	out, tree := map[string]any{}, map[string]any{}
	if text, err := json.Marshal(c); err == nil { // it has no error with this type
		_ = json.Unmarshal(text, &tree) // our own text
	}
	var walk func(prefix string, m map[string]any)
	walk = func(prefix string, m map[string]any) {
		for k, value := range m {
			if below, ok := value.(map[string]any); ok {
				walk(prefix+k+".", below)
			} else {
				out[prefix+k] = value
			}
		}
	}
	walk("", tree)
	return out
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

// Changed returns the fields, sorted, in which two configurations differ and that mean
// something here.
func Changed(a, b *Config) []string {
	before, after := leaves(a), leaves(b)
	all := maps.Clone(before)
	maps.Copy(all, after)
	var out []string
	for _, path := range slices.Sorted(maps.Keys(all)) {
		if isUsed(path) && !reflect.DeepEqual(before[path], after[path]) {
			out = append(out, path)
		}
	}
	return out
}

func isUsed(path string) bool {
	return slices.ContainsFunc(used, func(u string) bool { return path == u || strings.HasPrefix(path, u+".") })
}
