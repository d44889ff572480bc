package firewall

import (
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestEnginesOf(t *testing.T) {
	for _, test := range []struct{ chains, tables, want string }{
		{"cali-FORWARD KUBE-FORWARD", "filter", "Calico"},
		{"filter-FORWARD", "calico", "Calico"},
		{"KUBE-ROUTER-INPUT cali-tw-1", "filter", "Calico kube-router"},
		{"KUBE-NWPLCY-DEFAULT", "", "kube-router"},
		{"ANTREA-FORWARD", "", "Antrea"},
		{"CILIUM_FORWARD", "", "Cilium"},
		{"postrouting", "kube-network-policies", "kube-network-policies"},
		{"KUBE-FORWARD KUBE-SERVICES SLUICE-IN", "kube-proxy sluice", ""},
	} {
		var names []string
		for _, e := range enginesOf(strings.Fields(test.chains), strings.Fields(test.tables)) {
			names = append(names, e.Name)
		}
		check.Equalf(t, strings.Join(names, " "), test.want, "%+v", test)
	}
}
