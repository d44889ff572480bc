package main

import (
	"context"
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

// compileBPF compiles the mutated BPF programs in a directory, by the command in flow/bpf/doc.go,
// for the byte order of all machines that Sluice is built for. It returns the objects, by the
// files that they take the place of.
func (r *runner) compileBPF(ctx context.Context, m *mutation, dir string, text []byte) (map[string]string, error) {
	dir = filepath.Join(dir, "bpf") // the mutated file itself lies beside it
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(r.root, sources))); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, filepath.Base(m.file)), text, 0o644); err != nil {
		return nil, err
	}
	doc, err := os.ReadFile(filepath.Join(r.root, sources, "doc.go"))
	if err != nil {
		return nil, err
	}
	_, command, _ := strings.Cut(string(doc), "//go:generate go run ")
	command, _, _ = strings.Cut(command, "\n")
	program, arguments, _ := strings.Cut(command, " ")
	bpf2go := r.programs.get(program, func() built {
		path := filepath.Join(r.dir, "bpf2go")
		return built{path, r.compile(ctx, sources, "build", "-o", path, program)}
	})
	if bpf2go.err != nil {
		return nil, bpf2go.err
	}
	arguments = strings.NewReplacer("bpfel,bpfeb", "bpfel", "-Werror", "-Wno-everything").Replace(arguments)
	run := exec.CommandContext(ctx, "bash", "-c", bpf2go.path+" "+arguments)
	run.Dir = dir
	run.Env = append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := run.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mutation %s does not compile: %w\n%s", m.name, err, out)
	}
	const object = "kernel_bpfel.o"
	return map[string]string{filepath.Join(r.root, sources, object): filepath.Join(dir, object)}, nil
}

// place is the package that a mistake is built into.
func (m *mutation) place() string {
	if strings.HasPrefix(m.file, "web/assets/") {
		return "web" // which embeds it
	}
	return filepath.Dir(m.file)
}
