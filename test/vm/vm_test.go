package vm_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/vm"
)

// programs are built once, linked statically.
var programs struct {
	once  sync.Once
	dir   string
	init  string // the guests' first process
	proxy string
	tests string // package inside
	flows string // the tests of package flow
	sctp  string // package test/sctp
	err   error
}

func TestMain(m *testing.M) {
	status := m.Run()
	if programs.dir != "" {
		_ = os.RemoveAll(programs.dir)
	}
	os.Exit(status)
}

// need builds the programs, and skips the test if guests cannot run.
func need(t *testing.T) {
	t.Helper()
	if err := vm.Available(); err != nil {
		t.Skipf("SKIP-NEEDS: %v", err)
	}
	programs.once.Do(func() { programs.err = build() })
	if programs.err != nil {
		t.Fatal(programs.err)
	}
}

func build() (err error) {
	if programs.dir, err = os.MkdirTemp("", "sluice-vm-test-"); err != nil {
		return err
	}
	const module = "github.com/sluice-proxy/sluice/"
	for _, p := range []struct {
		path *string
		args []string
	}{
		{&programs.init, []string{"build", "-buildvcs=false", "-trimpath", "-o", "init", module + "test/vm/run"}},
		{&programs.proxy, []string{"build", "-buildvcs=false", "-trimpath", "-o", "sluice", module + "cmd/sluice"}},
		{&programs.flows, []string{"test", "-c", "-trimpath", "-o", "flow.test", module + "flow"}},
		{&programs.tests, []string{"test", "-c", "-trimpath", "-o", "inside.test", module + "test/vm/inside"}},
		{&programs.sctp, []string{"test", "-c", "-trimpath", "-o", "sctp.test", module + "test/sctp"}},
	} {
		out := slices.Index(p.args, "-o") + 1
		*p.path = filepath.Join(programs.dir, p.args[out])
		p.args[out] = *p.path
		p.args = slices.Insert(p.args, 1, "-ldflags=-s -w") // links in half the time
		cmd := exec.Command("go", p.args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(p.args, " "), err, out)
		}
	}
	return nil
}

// guest runs a command in a guest and returns its exit status and output.
func guest(t *testing.T, c vm.Config) (int, string) {
	t.Helper()
	need(t)
	var out bytes.Buffer
	c.Init, c.Output = programs.init, &out
	patience := time.Hour
	if os.Getenv("SLUICE_TEST_FULL") != "" {
		patience = 2 * time.Hour
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	status, err := vm.Run(ctx, c)
	if err != nil {
		t.Fatalf("%v\nit wrote:\n%s", err, out.String())
	}
	t.Logf("the guest wrote:\n%s", out.String())
	return status, out.String()
}

func TestCommandRunsInAGuest(t *testing.T) {
	dir := t.TempDir()
	status, out := guest(t, vm.Config{
		Command: []string{"/bin/sh", "-c", `
			echo "$WORD"; pwd; id -u
			cat /proc/sys/kernel/modules_disabled; cat /proc/modules
			echo kept > kept; ls /tmp/lost 2>/dev/null; touch /tmp/lost; touch /etc/lost 2>/dev/null && echo "the root can be written to"
			exit 7`},
		Env: []string{"WORD=two words"}, Modules: []string{"veth"}, Dir: dir, Writable: []string{dir},
	})
	check.Equalf(t, status, 7, "exit status")
	for _, want := range []string{"two words\n", dir + "\n", "\n0\n1\nveth "} {
		check.Contains(t, out, want)
	}
	if strings.Contains(out, "can be written to") {
		t.Error("the guest can write to the host's root")
	}
	if text, err := os.ReadFile(filepath.Join(dir, "kept")); err != nil || string(text) != "kept\n" {
		t.Errorf("a writable folder: %q, %v", text, err)
	}
	if _, err := os.Stat("/tmp/lost"); err == nil {
		t.Error("the guest's /tmp is the host's")
	}
}

func TestGuestThatFailsSaysWhy(t *testing.T) {
	need(t)
	for _, c := range []struct {
		config vm.Config
		want   string
	}{
		{vm.Config{Command: []string{"/bin/true"}, Modules: []string{"nonesuch"}}, "module nonesuch: this kernel has none"},
		{vm.Config{Command: []string{"/nonesuch"}}, "no such file"},
		{vm.Config{Command: []string{"true"}}, "absolute path"},
		{vm.Config{Command: []string{"/bin/sleep", "1000"}}, "deadline"},
	} {
		t.Run(c.want, func(t *testing.T) {
			t.Parallel()
			patience := 10 * time.Minute
			if c.want == "deadline" {
				patience = 5 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			c.config.Init = programs.init
			check.Errorf(t, must.Err(vm.Run(ctx, c.config)), c.want, "%q", c.config.Command)
		})
	}
}

// The guest's kernel gets its features by modules: without any it has neither
// netfilter nor ipset, but BPF.
var (
	network  = []string{"veth", "ipv6"}
	iptables = []string{
		"iptable_raw", "iptable_mangle", "iptable_filter", "ip6table_raw", "ip6table_mangle", "ip6table_filter",
		"xt_TPROXY", "xt_socket", "xt_CT", "xt_mark", "xt_comment", "xt_addrtype", "xt_tcpudp", "xt_sctp", "ipt_REJECT", "ip6t_REJECT",
	}
	ipset = []string{"xt_set", "ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_net"}
)

// In a kernel without nf_tables, without netfilter, or without CAP_BPF, auto
// chooses a mode that works, serves and keeps clients' addresses.
func TestKernelsWithLess(t *testing.T) {
	need(t)
	// CAP_SYS_ADMIN includes CAP_BPF's rights.
	const withoutBPF = "-bpf,-sys_admin"
	for _, c := range []struct {
		name    string
		modules []string
		caps    string
		want    string
	}{
		{"no netfilter", network, "", "sklookup;"},
		{"no netfilter, no CAP_BPF", network, withoutBPF, "bind;"},
		{"iptables-legacy with ipset", slices.Concat(network, iptables, ipset), "", "tproxy/iptables;"},
		{"iptables-legacy alone", slices.Concat(network, iptables), "", "tproxy/iptables;"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			status, out := guest(t, vm.Config{
				Command: []string{programs.tests, "-test.v", "-test.failfast"},
				Env:     []string{"SLUICE_BIN=" + programs.proxy, "SLUICE_VM_WANT=" + c.want, "SLUICE_VM_CAPS=" + c.caps, "SLUICE_REQUIRE_ROOT=1"},
				Modules: c.modules,
			})
			if status != 0 || !strings.Contains(out, "--- PASS: TestServes") {
				t.Errorf("exit status %d:\n%s", status, out)
			}
		})
	}
}

// sctpModules give the guest SCTP, and the checksum of its cookies.
var sctpModules = []string{"sctp", "hmac"}

// Services of SCTP, in every steering mode that this kernel has.
func TestSCTP(t *testing.T) {
	need(t)
	for _, c := range []struct {
		name, run string
		modules   []string
	}{
		{"sockets and relay", "Mailbox|Refusing|StreamsAndSource|Ends$|Relay|Path", nil},
		{"sklookup", "Promise[1-6]|EndsThrough|Cases", nil},
		{"take-over", "Promise7", nil},
		{"settings", "TestProxy(Keeps|BoundsMessages|Follows|Stops|Mode|Independent)", nil},
		{"faults", "TestProxy(Bears|BoundsSlow|Finds|Holds|Ends)", nil},
		{"tproxy/iptables", "Cases", slices.Concat(iptables, ipset)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			status, out := guest(t, vm.Config{
				Command: []string{programs.sctp, "-test.v", "-test.parallel=4", "-test.run", c.run}, // the guest has one CPU
				Env:     []string{"SLUICE_SCTP_PROGRAM=" + programs.proxy, "SLUICE_REQUIRE_ROOT=1", "SLUICE_TEST_FULL=" + os.Getenv("SLUICE_TEST_FULL")},
				Modules: slices.Concat(network, sctpModules, c.modules),
			})
			if status != 0 || !strings.Contains(out, "--- PASS: ") {
				t.Errorf("exit status %d:\n%s", status, out)
			}
		})
	}
}

// A kernel without SCTP serves everything else, says so, and serves SCTP once the module
// is loaded.
func TestKernelGetsSCTPLater(t *testing.T) {
	need(t)
	status, out := guest(t, vm.Config{
		Command: []string{programs.sctp, "-test.v", "-test.run", "TestModuleComesLater"},
		Env:     []string{"SLUICE_SCTP_PROGRAM=" + programs.proxy, "SLUICE_SCTP_LATER=1", "SLUICE_REQUIRE_ROOT=1"},
		Modules: network, Unlocked: true,
	})
	if status != 0 || !strings.Contains(out, "--- PASS: TestModuleComesLater") {
		t.Errorf("exit status %d:\n%s", status, out)
	}
}

// A kernel without tcx forwards connections by clsact.
func TestKernelFlowsWithoutTCX(t *testing.T) {
	need(t)
	status, out := guest(t, vm.Config{
		Command: []string{programs.flows, "-test.v", "-test.run", "^(TestTrial|TestConnectionPassesTheKernel|TestDeadEndpointIsRetriedInTheHandshake|TestMasquerade)"},
		Env:     []string{"SLUICE_REQUIRE_ROOT=1"},
		Modules: slices.Concat(network, []string{"sch_ingress", "cls_bpf"}),
	})
	if status != 0 || !strings.Contains(out, "--- PASS: TestTrial") {
		t.Errorf("exit status %d:\n%s", status, out)
	}
}
