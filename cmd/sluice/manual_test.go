package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestManual writes the manual pages and the completions of releases, into the folder
// SLUICE_MANUAL if it is set. Every visible command has a page, and every visible flag
// a line.
func TestManual(t *testing.T) {
	folder := os.Getenv("SLUICE_MANUAL")
	if folder == "" {
		folder = t.TempDir()
	}
	root := newRootCommand()
	root.DisableAutoGenTag = true // it has today's date
	header := &doc.GenManHeader{Section: "8", Manual: "Sluice", Source: "sluice " + version}
	if os.Getenv("SOURCE_DATE_EPOCH") == "" {
		date := time.Unix(0, 0)
		header.Date = &date
	}
	must.OK(t, doc.GenManTree(root, header, folder))
	pages := 0
	for _, cmd := range below(root) {
		if cmd.Hidden || cmd.Name() == "help" || strings.HasPrefix(cmd.CommandPath(), "sluice completion") {
			continue
		}
		pages++
		text, err := os.ReadFile(filepath.Join(folder, strings.ReplaceAll(cmd.CommandPath(), " ", "-")+".8"))
		if err != nil {
			t.Error(err)
			continue
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if line := `\fB--` + f.Name + `\fP`; !f.Hidden && !bytes.Contains(text, []byte(line)) {
				t.Errorf("the page of %s has no %s", cmd.CommandPath(), line)
			}
		})
	}
	if written, err := filepath.Glob(filepath.Join(folder, "*.8")); err != nil || pages < 6 || len(written) < pages {
		t.Errorf("%d pages of %d commands, %v", len(written), pages, err)
	}
	for shell, generate := range map[string]func(*bytes.Buffer) error{
		"bash": func(b *bytes.Buffer) error { return root.GenBashCompletionV2(b, true) },
		"zsh":  func(b *bytes.Buffer) error { return root.GenZshCompletion(b) },
		"fish": func(b *bytes.Buffer) error { return root.GenFishCompletion(b, true) },
	} {
		var script bytes.Buffer
		must.OK(t, generate(&script))
		must.OK(t, os.WriteFile(filepath.Join(folder, shell), script.Bytes(), 0o600))
		if !slices.Contains(strings.Fields(script.String()), "sluice") {
			t.Errorf("the completion for %s does not name the program", shell)
		}
	}
}
