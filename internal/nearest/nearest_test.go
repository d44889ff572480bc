package nearest

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestName(t *testing.T) {
	names := []string{"cluster-cidr", "config", "bind-address", "port"}
	for name, want := range map[string]string{
		"cluster-cdir": "cluster-cidr", "Config": "config", "confg": "config", "bindaddress": "bind-address",
		"manifests": "", "": "", strings.Repeat("x", 1000): "",
	} {
		check.Equalf(t, Name(name, 3, slices.Values(names)), want, "%q", name)
	}
}
