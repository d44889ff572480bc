package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// sources is the package of the BPF programs in C, and of what they are compiled to.
const sources = "flow/bpf"

func (m *mutation) isBPF() bool {
	return filepath.Dir(m.file) == sources && !strings.HasSuffix(m.file, ".go")
}

// compile compiles the mutated BPF programs in a directory, by the command in flow/bpf/doc.go.
// It gives the files that they take the place of.
func (m *mutation) compile(root, dir string, text []byte) (map[string]string, error) {
	dir = filepath.Join(dir, "bpf") // the mutated file itself lies beside it
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, sources))); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, filepath.Base(m.file)), text, 0o644); err != nil {
		return nil, err
	}
	doc, err := os.ReadFile(filepath.Join(root, sources, "doc.go"))
	if err != nil {
		return nil, err
	}
	_, command, _ := strings.Cut(string(doc), "//go:generate go run ")
	command, _, _ = strings.Cut(command, "\n")
	program, arguments, _ := strings.Cut(command, " ")
	bpf2go := filepath.Join(dir, "bpf2go")
	build := exec.Command("go", "build", "-o", bpf2go, program)
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", program, err, out)
	}
	run := exec.Command("bash", "-c", bpf2go+" "+strings.Replace(arguments, "-Werror", "-Wno-everything", 1))
	run.Dir = dir
	run.Env = append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := run.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mutation %s does not compile: %w\n%s", m.name, err, out)
	}
	replace := make(map[string]string)
	for _, object := range []string{"kernel_bpfel.o", "kernel_bpfeb.o"} {
		replace[filepath.Join(root, sources, object)] = filepath.Join(dir, object)
	}
	return replace, nil
}

// place is the package that a mistake is built into.
func (m *mutation) place() string {
	if strings.HasPrefix(m.file, "web/assets/") {
		return "web" // which embeds it
	}
	return filepath.Dir(m.file)
}
