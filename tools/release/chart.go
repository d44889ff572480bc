package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

var semantic = regexp.MustCompile(`^v?([0-9]+\.[0-9]+\.[0-9]+(?:-[0-9A-Za-z.-]+)?)$`)

// chartVersion is the version as Helm wants it: three numbers, and a suffix for what
// has no tag.
func chartVersion(version string) string {
	if m := semantic.FindStringSubmatch(version); m != nil {
		return m[1]
	}
	return "0.0.0-g" + regexp.MustCompile(`[^0-9A-Za-z.-]+`).ReplaceAllString(version, "-")
}

// writeChart packs the chart, as helm package does. Its default image is this version.
func (r *release) writeChart() error {
	files, err := filesBelow(filepath.Join(r.source, "deploy/helm/sluice"))
	if err != nil {
		return err
	}
	version := chartVersion(r.version)
	for _, change := range []struct{ path, from, to string }{
		{"Chart.yaml", `(?m)^version: .*$`, "version: " + version},
		{"Chart.yaml", `(?m)^appVersion: .*$`, fmt.Sprintf("appVersion: %q", r.version)},
		{"values.yaml", `(?m)^  repository: .*$`, "  repository: " + strings.TrimPrefix(r.image, "docker.io/library/")},
		{"values.yaml", `(?m)^  tag: .*$`, fmt.Sprintf("  tag: %q", r.version)},
	} {
		if err := replaceLine(files, change.path, regexp.MustCompile(change.from), change.to); err != nil {
			return err
		}
	}
	packed, err := zipped("sluice", files, r.date)
	if err != nil {
		return err
	}
	return r.write("sluice-chart-"+version+".tgz", packed)
}

// replaceLine replaces the only match in a file.
func replaceLine(files []file, path string, match *regexp.Regexp, to string) error {
	for i := range files {
		if files[i].path != path {
			continue
		}
		if n := len(match.FindAll(files[i].data, -1)); n != 1 {
			return fmt.Errorf("%s: %s matches %d lines, want 1", path, match, n)
		}
		files[i].data = match.ReplaceAllLiteral(files[i].data, []byte(to))
		return nil
	}
	return fmt.Errorf("the chart has no %s", path)
}
