package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// licenseFiles are the files of a module that must go with its code.
var licenseFiles = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents|copyright)([.-].*)?$`)

// licenses returns the license texts of Go and of all modules in a program.
func (r *release) licenses(ctx context.Context, p program) ([]byte, error) {
	folders, err := r.moduleFolders(ctx)
	if err != nil {
		return nil, err
	}
	goroot, err := r.command(ctx, nil, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "sluice %s is licensed under the Apache License 2.0. It contains code of Go and of\nthese modules, under the licenses below.\n", r.version)
	if err := appendLicenses(&out, p.info.GoVersion, strings.TrimSpace(goroot)); err != nil {
		return nil, err
	}
	for _, m := range p.info.Deps {
		name := m.Path + " " + m.Version
		if err := appendLicenses(&out, name, folders[name]); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

// moduleFolders returns the folders of all modules, by path and version.
func (r *release) moduleFolders(ctx context.Context) (map[string]string, error) {
	text, err := r.command(ctx, nil, "go", "list", "-m", "-json", "all")
	if err != nil {
		return nil, err
	}
	folders := map[string]string{}
	decoder := json.NewDecoder(strings.NewReader(text))
	for {
		var m struct{ Path, Version, Dir string }
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return folders, nil
		} else if err != nil {
			return nil, err
		}
		folders[m.Path+" "+m.Version] = m.Dir
	}
}

// appendLicenses appends the license files at the top of a module. A module without
// any is an error: it must not be in the program.
func appendLicenses(out *bytes.Buffer, module, folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return fmt.Errorf("licenses of %s: %w", module, err)
	}
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return e.IsDir() || !licenseFiles.MatchString(e.Name()) })
	if len(entries) == 0 {
		return fmt.Errorf("%s has no license in %s", module, folder)
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "\n%s\n%s: %s\n%s\n\n%s\n", strings.Repeat("=", 78), module, e.Name(), strings.Repeat("=", 78), bytes.TrimSpace(text))
	}
	return nil
}
