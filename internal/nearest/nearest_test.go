package nearest

import (
	"slices"
	"strings"
	"testing"
)

func TestName(t *testing.T) {
	names := []string{"cluster-cidr", "config", "bind-address", "port"}
	for name, want := range map[string]string{
		"cluster-cdir": "cluster-cidr", "Config": "config", "confg": "config", "bindaddress": "bind-address",
		"manifests": "", "": "", strings.Repeat("x", 1000): "",
	} {
		if got := Name(name, 3, slices.Values(names)); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}
