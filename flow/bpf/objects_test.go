package bpf

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// TestObjectsAreWhatTheSourcesGive compiles the sources again, with the same version of clang
// (Debian's package clang-14), and compares everything with what is committed.
func TestObjectsAreWhatTheSourcesGive(t *testing.T) {
	for _, program := range []string{"clang-14", "llvm-strip-14"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
				t.Fatal(err)
			}
			t.Skipf("SKIP-NEEDS: %v", err)
		}
	}
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, command, found := strings.Cut(string(text), "//go:generate go run ")
	if !found {
		t.Fatal("doc.go has no go:generate line")
	}
	command, _, _ = strings.Cut(command, "\n")
	dir := t.TempDir()
	for _, pattern := range []string{"*.h", "*.c"} {
		sources, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, source := range sources {
			text, err := os.ReadFile(source)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, source), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	// bpf2go names the sources relative to its working directory.
	bpf2go := filepath.Join(dir, "bpf2go")
	program, arguments, _ := strings.Cut(command, " ")
	if out, err := exec.Command("go", "build", "-o", bpf2go, program).CombinedOutput(); err != nil {
		t.Fatalf("build bpf2go: %v\n%s", err, out)
	}
	run := exec.Command("bash", "-c", bpf2go+" "+arguments)
	run.Dir = dir
	run.Env = append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("bpf2go: %v\n%s", err, out)
	}
	for _, file := range []string{"kernel_bpfel.go", "kernel_bpfeb.go", "kernel_bpfel.o", "kernel_bpfeb.o"} {
		committed, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		built, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(committed, built) {
			t.Errorf("%s is not what the sources give: run make bpf", file)
		}
	}
}

// TestSizes keeps what an open flow costs in view, and that array elements lie one behind
// the other in memory (the kernel rounds their size to 8).
func TestSizes(t *testing.T) {
	if size := unsafe.Sizeof(KernelFlow{}); size != 256 {
		t.Errorf("a flow has %d bytes", size)
	}
	if size := unsafe.Sizeof(KernelBucket{}); size != 64 {
		t.Errorf("a bucket has %d bytes, no cache line", size)
	}
	if size := unsafe.Sizeof(KernelLoad{}); size != 56 {
		t.Errorf("a load has %d bytes", size)
	}
	if size := unsafe.Sizeof(KernelControl{}); size != 96 {
		t.Errorf("control has %d bytes", size)
	}
}

func TestKernelLoads(t *testing.T) {
	requireRoot(t)
	k, err := Open(1000, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if len(k.Flows) != 1001 || int(k.Maps.Flows.ValueSize()) != int(unsafe.Sizeof(KernelFlow{})) {
		t.Errorf("%d flows of %d bytes", len(k.Flows), k.Maps.Flows.ValueSize())
	}
}

// requireRoot skips a test that loads BPF programs.
func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, to load BPF programs")
	}
}
