package kubeproxyconfig

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
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

// Load reads a configuration file: strictly at first, and with a warning where
// that fails but the rest can be used, as kube-proxy does.
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
	if err := yaml.UnmarshalStrict(text, given); err != nil {
		strict := err
		*given = Config{}
		if err := yaml.Unmarshal(text, given); err != nil {
			return nil, fmt.Errorf("not a %s: %w", kind, err)
		}
		f.Warnings = append(f.Warnings, strings.Join(strings.Fields(strict.Error()), " ")) // on one line
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
