package doctor

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// On the machine of the tests every steering mode works, and looking changes
// nothing.
func TestHost(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	before := lab.Node.Dump(t)
	var r Report
	must.OK(t, lab.Node.Do(func() error {
		r = Examine(Host(choose.Options{Table: "sluice"}))
		return nil
	}))
	if r.Chosen == "" {
		t.Error("no steering mode works")
	}
	for _, f := range r.Findings {
		t.Logf("%+v", f)
		if f.NeededBy == "" {
			t.Errorf("%s: needed by nobody", f.Feature)
		}
		if f.State == Unknown {
			t.Errorf("%s: %s", f.Feature, f.Found)
		}
	}
	check.Textf(t, lab.Node.Dump(t), before, "left behind")
}

// What kube-proxy leaves is found, and what the kubelet makes is not taken for
// it.
func TestLeftoversAreFound(t *testing.T) {
	node := netns.New(t, "node")
	look := func() (found []string) {
		t.Helper()
		must.OK(t, node.Do(func() (err error) {
			found, err = kubeproxy.Leftovers()
			return err
		}))
		return found
	}
	conn := must.Get(nftables.New(nftables.WithNetNSFd(node.FD())))(t)
	chains := func(family nftables.TableFamily, table string, names ...string) {
		t.Helper()
		made := conn.AddTable(&nftables.Table{Name: table, Family: family})
		for _, name := range names {
			conn.AddChain(&nftables.Chain{Table: made, Name: name})
		}
		must.OK(t, conn.Flush())
	}
	chains(nftables.TableFamilyIPv4, "nat", "DOCKER", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT")
	if found := look(); len(found) != 0 {
		t.Errorf("found %q where nothing is", found)
	}
	chains(nftables.TableFamilyIPv4, "nat", "KUBE-SERVICES", "KUBE-SVC-ERIFXISQEP7F7OF4")
	chains(nftables.TableFamilyIPv6, "kube-proxy", "services", "firewall")
	netns.Wire(t, node, "kube-ipvs0", nil, netns.New(t, "peer"), "eth0", nil)
	want := []string{"the nftables table kube-proxy", "2 iptables-nft chains KUBE-…", "the interface kube-ipvs0"}
	check.EqualSlicesf(t, look(), want, "found")
}

// An image has no programs of iptables, and doctor says all the same what is there.
func TestLegacyChainsAreFoundWithoutPrograms(t *testing.T) {
	node := netns.New(t, "node")
	for _, program := range []string{"iptables-legacy-restore", "ip6tables-legacy-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("SKIP-NEEDS: %s", program)
		}
		cmd := node.Command(t, program)
		cmd.Stdin = strings.NewReader("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-FIREWALL - [0:0]\n:KUBE-POSTROUTING - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n*filter\n:cali-FORWARD - [0:0]\nCOMMIT\n")
		must.Run(t, cmd)
	}
	t.Setenv("PATH", "/nowhere")
	if err := node.Do(func() error {
		found, err := kubeproxy.Leftovers()
		check.EqualSlicesf(t, found, []string{"2 chains KUBE-… of ip6tables-legacy", "2 chains KUBE-… of iptables-legacy"}, "found")
		engines, engineErr := firewall.Engines()
		if len(engines) != 1 || engines[0].Name != "Calico" {
			t.Errorf("found the engines %+v, want Calico", engines)
		}
		return errors.Join(err, engineErr)
	}); err != nil {
		t.Error(err)
	}
}

// A proxy that runs is seen by its lock.
func TestRunning(t *testing.T) {
	node := netns.New(t, "node")
	must.OK(t, node.Do(func() error {
		h := &host{options: choose.Options{Table: "doctor-test"}}
		if pid, ok, err := h.Running(); ok || err != nil {
			t.Errorf("nobody runs: %d, %v, %v", pid, ok, err)
		}
		lock, err := redirect.AcquireLock("doctor-test")
		if err != nil {
			return err
		}
		defer lock.Release()
		if pid, ok, err := h.Running(); pid == 0 || !ok || err != nil {
			t.Errorf("one runs: %d, %v, %v", pid, ok, err)
		}
		return nil
	}))
}
