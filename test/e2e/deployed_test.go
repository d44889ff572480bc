package e2e

import (
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// deployments are the files that say which capabilities Sluice gets, and where in them.
var deployments = []struct {
	name, file string
	list       *regexp.Regexp
}{
	{"kustomize", "kustomize/base/daemonset.yaml", regexp.MustCompile(`add: \[(.*)\]`)},
	{"chart", "helm/sluice/templates/_helpers.tpl", regexp.MustCompile(`concat \(list ([^)]*)\)`)},
	{"unit", "systemd/sluice.service", regexp.MustCompile(`CapabilityBoundingSet=(.*)`)},
}

// granted returns the capabilities that a deployment's file grants, as setpriv calls them.
func granted(t *testing.T, file string, list *regexp.Regexp) (names []string) {
	t.Helper()
	text := must.Read(t, filepath.Join("../../deploy", file))
	found := list.FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s lists no capabilities", file)
	}
	for _, name := range strings.FieldsFunc(string(found[1]), func(r rune) bool { return strings.ContainsRune(`", `, r) }) {
		names = append(names, strings.ToLower(strings.TrimPrefix(name, "CAP_")))
	}
	return names
}

// with starts a program with these capabilities only.
func with(capabilities []string) []string {
	return []string{"setpriv", "--bounding-set=-all,+" + strings.Join(capabilities, ",+"), "--no-new-privs"}
}

// TestDeployedRights: with exactly the capabilities of each deployment, the kernel forwards.
// Without one of those that kernel flows need, the relay serves, and the log says which.
func TestDeployedRights(t *testing.T) {
	t.Parallel()
	for _, d := range deployments {
		t.Run(d.name, func(t *testing.T) {
			rights := granted(t, d.file, d.list)
			if slices.Contains(rights, "sys_admin") {
				t.Errorf("%s grants %v", d.file, rights)
			}
			pathWith(t, rights, "kernel", "", "--datapath", "auto") // the default
		})
	}
	all := granted(t, deployments[0].file, deployments[0].list)
	for _, missing := range []string{"bpf", "perfmon", "net_raw"} {
		t.Run("without "+missing, func(t *testing.T) {
			rights := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == missing })
			pathWith(t, rights, "relay", "CAP_"+strings.ToUpper(missing)+" is missing", "--datapath", "auto")
		})
	}
}

// pathWith expects connections of a client to be served by a data path, and the log to say why.
func pathWith(t *testing.T, rights []string, path, why string, flags ...string) {
	t.Helper()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.under = with(rights)
	p.start(flags...)
	if why != "" && !strings.Contains(p.stderr.String(), why) {
		t.Errorf("the log does not say %q", why)
	}
	for had, vip := range []string{vip4, vip6} {
		must.OKf(t, must.Err(lab.Client.Ask("tcp", net.JoinHostPort(vip, "80"))), "to %s", vip)
		check.Equalf(t, p.awaitRecords(had + 1)[had].Path, path, "to %s: the path is", vip)
	}
	p.stop()
}
