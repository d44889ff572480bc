package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// program is the binary for one architecture.
type program struct {
	arch     string
	binary   []byte
	info     *buildinfo.BuildInfo
	licenses []byte
}

// program builds the binary with the flags of the Makefile.
func (r *release) program(ctx context.Context, arch string) (program, error) {
	folder, err := os.MkdirTemp("", "sluice-release-")
	if err != nil {
		return program{}, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	path := filepath.Join(folder, "sluice")
	if _, err := r.command(ctx, []string{"GOOS=linux", "GOARCH=" + arch}, "go", "build", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -X main.version="+r.version, "-o", path, "./cmd/sluice"); err != nil {
		return program{}, err
	}
	binary, err := os.ReadFile(path)
	if err != nil {
		return program{}, err
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	return program{arch: arch, binary: binary, info: info}, err
}

// command runs a program in the repository, with the environment that every build
// has, and returns its output.
func (r *release) command(ctx context.Context, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = r.source
	// Levels of an architecture that the builder's environment chooses would be in the
	// result.
	cmd.Env = append(os.Environ(), append([]string{
		"CGO_ENABLED=0", "GOFLAGS=-trimpath", "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOWORK=off",
		fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.date.Unix()),
	}, env...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return string(out), nil
}
