package kubeproxyconfig

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/internal/nearest"
)

const (
	apiVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kind       = "KubeProxyConfiguration"

	// maxSize is more than any such file has, in bytes.
	maxSize = 1 << 20
)

// Config is kube-proxy's configuration.
type Config = v1alpha1.KubeProxyConfiguration

// File is a configuration file that was read.
type File struct {
	Text []byte
	// Config is the file with the defaults filled in.
	Config *Config
	// Given is the file as it was written.
	Given *Config
	// Warnings are what is wrong with it and was passed over: fields that do not
	// exist, or are there twice.
	Warnings []string
}

// Load reads a configuration file. Fields that do not exist are warnings, and the rest
// is used, as kube-proxy does.
func Load(path string) (*File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxSize {
		return nil, fmt.Errorf("%s: %d bytes are too many for a configuration", path, info.Size())
	}
	text, err := os.ReadFile(path) //nolint:gosec // the file that the flag names
	if err != nil {
		return nil, err
	}
	f, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// Parse is Load for the text of a file.
func Parse(text []byte) (*File, error) {
	given := &Config{}
	f := &File{Text: text, Given: given}
	// Decoded as the API's objects, which kube-proxy does too: names of fields are
	// case-sensitive, and all that do not exist are named.
	if _, err := yaml.YAMLToJSONStrict(text); err != nil {
		f.Warnings = append(f.Warnings, strings.Join(strings.Fields(err.Error()), " ")) // on one line
	}
	asJSON, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, fmt.Errorf("not a %s: %w", kind, err)
	}
	strict, err := json.UnmarshalStrict(asJSON, given)
	if err != nil {
		return nil, fmt.Errorf("not a %s: %w", kind, err)
	}
	for _, err := range strict {
		f.Warnings = append(f.Warnings, err.Error()+likely(err))
	}
	switch {
	case given.Kind == "" && given.APIVersion == "":
		return nil, errors.New("not a KubeProxyConfiguration: apiVersion and kind are missing")
	case given.APIVersion != apiVersion || given.Kind != kind:
		return nil, fmt.Errorf("it holds a %s of %s, and not a %s of %s", given.Kind, given.APIVersion, kind, apiVersion)
	}
	f.Config = given.DeepCopy()
	SetDefaults(f.Config)
	if err := Validate(f.Config); err != nil {
		return nil, err
	}
	return f, nil
}

// likely returns `; did you mean "nodePortAddresses"?` for a field that does not exist
// and is spelled nearly as one that does, or "".
func likely(err error) string {
	var field json.FieldError
	if !errors.As(err, &field) {
		return ""
	}
	path := field.FieldPath()
	return nearest.Hint(path, min(4, len(path)/3), slices.Values(slices.Sorted(maps.Keys(leaves(Default())))))
}

// Default returns the configuration that an empty file stands for.
func Default() *Config {
	c := &Config{}
	c.APIVersion, c.Kind = apiVersion, kind
	SetDefaults(c)
	return c
}

// Write writes a configuration to a file, such as Load reads.
func Write(path string, c *Config) error {
	text, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}
