package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// checked runs sluice check in a directory, and returns its output.
func checked(t *testing.T, dir string, args ...string) (string, error) {
	t.Helper()
	t.Chdir(dir)
	out, _, err := runCommand("", append([]string{"check"}, args...)...)
	return out, err
}

// TestCheckOutput has the forms of the output and the exit statuses.
func TestCheckOutput(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		must.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	check.Errorf(t, must.Err(checked(t, dir, dir)), "there are no manifests", "an empty directory")
	if _, err := checked(t, dir, "none.yaml"); err == nil || errors.Is(err, errReported) {
		t.Errorf("a file that does not exist: %v", err)
	}
	write("web.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}]}\n")
	if out, err := checked(t, dir, "web.yaml"); !errors.Is(err, errReported) || !strings.Contains(out, "files 1, Services 1, errors 0, warnings 1") {
		t.Errorf("a warning: %v\n%s", err, out)
	}
	if _, err := checked(t, dir, "--fail-on=error", "web.yaml"); err != nil {
		t.Errorf("a warning is taken for an error: %v", err)
	}
	write("api.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: api}\nspec: {ports: [{port: 0}]}\n")
	out, err := checked(t, dir, "--fail-on=error", "-o", "json", "web.yaml", "api.yaml")
	if !errors.Is(err, errReported) {
		t.Error(err)
	}
	var report struct {
		Files, Services, Errors, Warnings int
		Findings                          []manifests.Finding
	}
	must.OK(t, json.Unmarshal([]byte(out), &report))
	if report.Files != 2 || report.Services != 1 || report.Errors != 1 || report.Warnings != 1 || len(report.Findings) != 2 {
		t.Errorf("%+v", report)
	}
	if f := report.Findings[0]; f.File != "api.yaml" || f.Line != 4 || f.Severity != manifests.Error || f.Object != "Service default/api" || !strings.Contains(f.Text, "0 is not in 1..65535") {
		t.Errorf("%+v", f)
	}
}
