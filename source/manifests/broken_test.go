package manifests

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file, or writes it.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		must.OK(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want := must.Read(t, file)
	check.Textf(t, cmp.Diff(string(want), got), "", "%s (-want +got); -update writes it anew", file)
}

const samples = "../../test/manifests"

// What is said about each kind of broken manifest is in the golden file, for
// people to read: the file, the line, the object, what is wrong.
func TestBrokenManifests(t *testing.T) {
	dir := filepath.Join(samples, "broken")
	entries := must.Get(os.ReadDir(dir))(t)
	var out strings.Builder
	for _, e := range entries {
		data := must.Read(t, filepath.Join(dir, e.Name()))
		c, findings := decode(e.Name(), data, Options{})
		for _, f := range findings {
			if f.warning {
				out.WriteString("warning ")
			} else {
				out.WriteString("error   ")
			}
			out.WriteString(f.String() + "\n")
		}
		if len(findings) == 0 {
			out.WriteString("fine    " + e.Name() + ":")
			for _, o := range c.objects {
				out.WriteString(" " + o.key.String())
			}
			out.WriteString("\n")
		}
		lines := strings.Count(string(data), "\n") + 1
		if i := slices.IndexFunc(findings, func(f finding) bool { return f.file != e.Name() || f.line > lines }); i >= 0 {
			t.Errorf("%s has no such line: %s", e.Name(), findings[i])
		}
	}
	golden(t, filepath.Join("testdata", "broken.golden"), out.String())
}
