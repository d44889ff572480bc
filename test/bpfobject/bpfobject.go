// Package bpfobject checks that the BPF objects in a package's folder are made of its sources.
package bpfobject

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Check compiles the C sources of the test's folder again by the go:generate line of its doc.go,
// with the same version of clang (Debian's package clang-14), and compares everything with what
// is committed.
func Check(t *testing.T) {
	t.Helper()
	for _, program := range []string{"clang-14", "llvm-strip-14"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
				t.Fatal(err)
			}
			t.Skipf("SKIP-NEEDS: %v", err)
		}
	}
	doc := must.Read(t, "doc.go")
	_, command, found := strings.Cut(string(doc), "//go:generate go run ")
	if !found {
		t.Fatal("doc.go has no go:generate line")
	}
	command, _, _ = strings.Cut(command, "\n")
	dir := t.TempDir()
	for _, pattern := range []string{"*.h", "*.c"} {
		for _, source := range glob(t, pattern) {
			must.OK(t, os.WriteFile(filepath.Join(dir, source), read(t, source), 0o600))
		}
	}
	// bpf2go names the sources relative to its working directory.
	bpf2go := filepath.Join(dir, "bpf2go")
	program, arguments, _ := strings.Cut(command, " ")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bpf2go, program)
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as bin/sluice: the build cache has its packages
	must.Run(t, build)
	run := exec.Command("bash", "-c", bpf2go+" "+arguments)
	run.Dir = dir
	run.Env = append(os.Environ(), "GOPACKAGE=bpf")
	must.Run(t, run)
	files := glob(t, "*_bpfe[bl].*")
	check.Equalf(t, len(files), 4, "%q, not one Go file and one object of each byte order", files)
	for _, file := range files {
		if !bytes.Equal(read(t, file), read(t, filepath.Join(dir, file))) {
			t.Errorf("%s is not what the sources give: run make bpf", file)
		}
	}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	return must.Get(filepath.Glob(pattern))(t)
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	text := must.Read(t, file)
	return text
}
