// Package chart renders the Helm chart in deploy/ as helm template and helm install
// --dry-run=server do: it checks the values with the schema, and looks objects up
// where an API server is known.
package chart

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// Release is what a render depends on.
type Release struct {
	Name, Namespace string
	Values          map[string]any
	// Server is the API server in which lookup finds objects; nil: it finds none.
	Server *rest.Config
	// Objects take the place of Server.
	Objects engine.ClientProvider
}

// Render returns the objects of a chart's release, one text for each, sorted.
func Render(folder string, r Release) ([]string, error) {
	c, err := loader.Load(folder)
	if err != nil {
		return nil, err
	}
	all, err := chartutil.ToRenderValues(c, r.Values, chartutil.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	var files map[string]string
	switch {
	case r.Objects != nil:
		files, err = engine.RenderWithClientProvider(c, all, r.Objects)
	case r.Server != nil:
		files, err = engine.RenderWithClient(c, all, r.Server)
	default:
		files, err = engine.Render(c, all)
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if path.Ext(name) != ".yaml" {
			continue // notes for people, and helpers
		}
		objects, err := Objects(files[name])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, objects...)
	}
	slices.Sort(out)
	return out, nil
}

// Objects splits a text of several objects, and writes each in one form.
func Objects(text string) ([]string, error) {
	var out []string
	for _, document := range strings.Split(text, "\n---\n") {
		var value map[string]any
		if err := yaml.UnmarshalStrict([]byte(document), &value); err != nil {
			return nil, fmt.Errorf("%w\n%s", err, document)
		}
		if value == nil {
			continue
		}
		normal, err := yaml.Marshal(value)
		if err != nil {
			return nil, err
		}
		out = append(out, string(normal))
	}
	slices.Sort(out)
	return out, nil
}
