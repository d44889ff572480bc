package vm_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/vm"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// build builds a program of this module, linked statically.
func build(t *testing.T, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), filepath.Base(pkg))
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", path, "github.com/sluice-proxy/sluice/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return path
}

// guest runs a command in a guest and gives its exit status and what it wrote.
func guest(t *testing.T, c vm.Config) (int, string) {
	t.Helper()
	if err := vm.Available(); err != nil {
		t.Skipf("SKIP-NEEDS: %v", err)
	}
	var out bytes.Buffer
	c.Init, c.Output = build(t, "test/vm/run"), &out
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	status, err := vm.Run(ctx, c)
	if err != nil {
		t.Fatalf("%v\nit wrote:\n%s", err, out.String())
	}
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
	if status != 7 {
		t.Errorf("exit status %d, want 7", status)
	}
	for _, want := range []string{"two words\n", dir + "\n", "\n0\n1\nveth "} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in:\n%s", want, out)
		}
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
	if err := vm.Available(); err != nil {
		t.Skipf("SKIP-NEEDS: %v", err)
	}
	init := build(t, "test/vm/run")
	for _, c := range []struct {
		config vm.Config
		want   string
	}{
		{vm.Config{Command: []string{"/bin/true"}, Modules: []string{"nonesuch"}}, "module nonesuch: this kernel has none"},
		{vm.Config{Command: []string{"/nonesuch"}}, "no such file"},
		{vm.Config{Command: []string{"true"}}, "absolute path"},
	} {
		c.config.Init = init
		if _, err := vm.Run(t.Context(), c.config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got %v, want %q", c.config.Command, err, c.want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := vm.Run(ctx, vm.Config{Init: init, Command: []string{"/bin/sleep", "1000"}}); err == nil || !strings.Contains(err.Error(), "deadline") {
		t.Errorf("a command that does not end: %v", err)
	}
}
