package main

import (
	"context"
	"os"
	"path/filepath"
)

// manual returns the manual pages and the completions for shells, by their paths in
// the archive. The program itself makes them.
func (r *release) manual(ctx context.Context) ([]file, error) {
	folder, err := os.MkdirTemp("", "sluice-manual-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	// cmd/sluice is a main package, so only its tests can read its commands.
	if _, err := r.command(ctx, []string{"SLUICE_MANUAL=" + folder}, "go", "test", "-count=1", "-run", "^TestManual$",
		"-ldflags", "-X github.com/sluice-proxy/sluice/cmd/sluice.version="+r.version, "./cmd/sluice"); err != nil {
		return nil, err
	}
	var files []file
	pages, err := filepath.Glob(filepath.Join(folder, "*.8"))
	if err != nil {
		return nil, err
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return nil, err
		}
		files = append(files, file{"man/man8/" + filepath.Base(page), 0o644, text})
	}
	for shell, path := range map[string]string{"bash": "sluice", "zsh": "_sluice", "fish": "sluice.fish"} {
		text, err := os.ReadFile(filepath.Join(folder, shell))
		if err != nil {
			return nil, err
		}
		files = append(files, file{"completions/" + shell + "/" + path, 0o644, text})
	}
	return files, nil
}
