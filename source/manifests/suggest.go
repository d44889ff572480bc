package manifests

import (
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/internal/nearest"
)

// restricting are the fields that keep clients or endpoints out. One that is misspelled
// is an error: the object would let in whom its author meant to keep out.
var restricting = []string{
	"loadBalancerSourceRanges", "externalTrafficPolicy", "internalTrafficPolicy", "sessionAffinity", "sessionAffinityConfig",
	"protocol", "conditions", "ready", "serving", "terminating",
}

// suggest returns the name of the type's field that is spelled nearly as the unknown one
// at the path's end, or "".
func suggest(t reflect.Type, path string) string {
	parts := strings.Split(strings.ReplaceAll(withoutIndices(path), "[]", ""), ".")
	name := parts[len(parts)-1]
	for _, part := range parts[:len(parts)-1] {
		t = fields(t)[part]
	}
	return nearest.Name(name, min(3, len(name)/2), slices.Values(slices.Sorted(maps.Keys(fields(t)))))
}

// fields returns the JSON names of a struct, of what a pointer leads to, or of a
// list's elements.
func fields(t reflect.Type) map[string]reflect.Type {
	for t != nil && (t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice) {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	all := make(map[string]reflect.Type)
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			all[name] = f.Type
		}
	}
	return all
}
