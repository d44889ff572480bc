package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"
)

const version = "v0.1.0-rc.1"

// full says that everything is built anew, for all architectures.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") != "" }

// built returns a release of this tree, which all tests share. Unless the tests run at
// full size, it is only for this machine's architecture.
func built(t *testing.T) *release {
	t.Helper()
	if once.r == nil && once.err == nil {
		once.folder, once.err = os.MkdirTemp("", "sluice-release-test-")
		if once.err == nil {
			once.r = sample("../..", filepath.Join(once.folder, "dist"))
			once.err = once.r.build(t.Context())
		}
	}
	if once.err != nil {
		t.Fatal(once.err)
	}
	return once.r
}

var once struct {
	r      *release
	folder string
	err    error
}

func TestMain(m *testing.M) {
	status := m.Run()
	_ = os.RemoveAll(once.folder)
	os.Exit(status)
}

func sample(source, out string) *release {
	r := &release{source: source, out: out, version: version, date: time.Unix(1700000000, 0).UTC(), arches: []string{"amd64"}, image: "docker.io/library/sluice"}
	if full() {
		r.arches = append(r.arches, "arm64")
	}
	return r
}

// A copy of the tree in another folder gives the same bytes, at another time. At full
// size it is also compiled with an empty cache.
func TestTwiceTheSameBytes(t *testing.T) {
	first := built(t)
	folder := filepath.Join(t.TempDir(), "a", "copy")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	copied := exec.Command("sh", "-c", `git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -c | tar -x -C "$1"`, "sh", folder)
	copied.Dir = first.source
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if full() {
		t.Setenv("GOCACHE", t.TempDir())
	}
	second := sample(folder, filepath.Join(t.TempDir(), "dist"))
	if err := second.build(t.Context()); err != nil {
		t.Fatal(err)
	}
	var sums [2]string
	for i, r := range []*release{first, second} {
		text, err := os.ReadFile(filepath.Join(r.out, sumsFile))
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = string(text)
	}
	if sums[0] != sums[1] || strings.Count(sums[0], "\n") != 2+2*len(first.arches) {
		t.Errorf("the checksums of two builds:\n%s\n%s", sums[0], sums[1])
	}
	t.Logf("%s: two builds of\n%s", first.version, sums[0])
	check := exec.Command("sha256sum", "--check", "--strict", sumsFile)
	check.Dir = first.out
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// archived returns the files of an archive, and checks their owners, dates and order.
func archived(t *testing.T, r *release, name string) map[string][]byte {
	t.Helper()
	f, err := os.Open(filepath.Join(r.out, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for in := tar.NewReader(unzipped); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Uid != 0 || header.Gid != 0 || header.Uname != "" || !header.ModTime.Equal(r.date) {
			t.Errorf("%s: %s has owner %d:%d %q and date %s", name, header.Name, header.Uid, header.Gid, header.Uname, header.ModTime)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeReg {
			files[header.Name] = data
		}
	}
}

// The archive has the program of this version, its manual, its completions and a unit
// that systemd takes.
func TestArchive(t *testing.T) {
	r := built(t)
	top := r.name("amd64")
	files := archived(t, r, top+".tar.gz")
	folder := t.TempDir()
	for name, data := range files {
		path := filepath.Join(folder, strings.TrimPrefix(name, top+"/"))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	said := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = folder
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %q: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	if got := said("./sluice", "version"); !strings.Contains(got, "sluice "+version+" ") {
		t.Errorf("its version is %q", got)
	}
	for _, page := range []string{"sluice", "sluice-run", "sluice-cleanup", "sluice-doctor", "sluice-explain", "sluice-demo", "sluice-version"} {
		text := string(files[top+"/man/man8/"+page+".8"])
		if !strings.Contains(text, `"Nov 2023"`) || !strings.Contains(text, version) {
			t.Errorf("%s.8 has another date or version:\n%.200s", page, text)
		}
	}
	said("bash", "-n", "completions/bash/sluice")
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "systemd/sluice.default", "completions/zsh/_sluice", "completions/fish/sluice.fish"} {
		if len(files[top+"/"+name]) == 0 {
			t.Errorf("there is no %s", name)
		}
	}
	for _, module := range []string{"go1.", "k8s.io/client-go ", "github.com/spf13/cobra "} {
		if !strings.Contains(string(files[top+"/THIRD-PARTY-LICENSES.txt"]), "\n"+module) {
			t.Errorf("there is no license of %s", module)
		}
	}
	// The unit's program is where the unit wants it.
	unit, err := os.ReadFile(filepath.Join(folder, "systemd/sluice.service"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "sluice.service"), bytes.ReplaceAll(unit, []byte("/usr/local/bin/"), []byte(folder+"/")), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := said("systemd-analyze", "verify", "--man=no", filepath.Join(folder, "sluice.service")); strings.Contains(out, "sluice.service") {
		t.Errorf("systemd says of the unit:\n%s", out)
	}
	if !bytes.Contains(unit, []byte(`$SLUICE_ARGS`)) || !bytes.Contains(files[top+"/systemd/sluice.default"], []byte("\nSLUICE_ARGS=")) {
		t.Error("the unit's flags are not those of sluice.default")
	}
}

// The SBOM lists Go and the modules that the binary names, and the binary.
func TestBillOfMaterials(t *testing.T) {
	r := built(t)
	for _, arch := range r.arches {
		text, err := os.ReadFile(filepath.Join(r.out, r.name(arch)+".spdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		document, err := spdxjson.Read(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := spdxlib.ValidateDocument(document); err != nil {
			t.Error(err)
		}
		p, err := r.program(t.Context(), arch)
		if err != nil {
			t.Fatal(err)
		}
		listed := map[string]*spdx.Package{}
		for _, d := range document.Packages {
			listed[d.PackageName+" "+d.PackageVersion] = d
		}
		for _, m := range p.info.Deps {
			if d := listed[m.Path+" "+m.Version]; d == nil || d.PackageSourceInfo != "go.sum "+m.Sum || d.PackageExternalReferences[0].Locator != "pkg:golang/"+m.Path+"@"+m.Version {
				t.Errorf("%s %s: %+v", m.Path, m.Version, d)
			}
		}
		if len(listed) != len(p.info.Deps)+2 || listed["sluice "+version] == nil || listed["stdlib "+strings.TrimPrefix(p.info.GoVersion, "go")] == nil {
			t.Errorf("%d packages, want %d and sluice and Go", len(listed), len(p.info.Deps))
		}
		if len(document.Relationships) != len(p.info.Deps)+3 {
			t.Errorf("%d relationships", len(document.Relationships))
		}
	}
}

// The chart is of this version and deploys this version's image.
func TestChartIsStamped(t *testing.T) {
	r := built(t)
	files := archived(t, r, "sluice-chart-0.1.0-rc.1.tgz")
	for name, wants := range map[string][]string{
		"sluice/Chart.yaml":  {"version: 0.1.0-rc.1\n", `appVersion: "` + version + "\"\n"},
		"sluice/values.yaml": {"  repository: sluice\n", `  tag: "` + version + "\"\n"},
		"sluice/alerts.yaml": {"SluiceDown"},
	} {
		for _, want := range wants {
			if !strings.Contains(string(files[name]), want) {
				t.Errorf("%s has no %q:\n%.300s", name, want, files[name])
			}
		}
	}
	for from, want := range map[string]string{"v1.2.3": "1.2.3", "1.2.3-4-gabc1234": "1.2.3-4-gabc1234", "0123456-dirty": "0.0.0-g0123456-dirty", "unknown": "0.0.0-gunknown"} {
		if got := chartVersion(from); got != want {
			t.Errorf("%s is %s, want %s", from, got, want)
		}
	}
}

// A registry gets the image of the archive, for each architecture.
func TestPush(t *testing.T) {
	r := built(t)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	repository := strings.TrimPrefix(server.URL, "http://") + "/net/sluice"
	if err := r.push(t.Context(), repository); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(repository + ":" + version)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(tag)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != len(r.arches) {
		t.Fatalf("%+v, %v", manifest, err)
	}
	archive, err := os.ReadFile(filepath.Join(r.out, r.imageArchive()))
	if err != nil {
		t.Fatal(err)
	}
	if digest, err := index.Digest(); err != nil || !bytes.Contains(archive, []byte(digest.String())) {
		t.Errorf("the archive has no %s, %v", digest, err)
	}
	for i, arch := range r.arches {
		image, err := index.Image(manifest.Manifests[i].Digest)
		if err != nil {
			t.Fatal(err)
		}
		config, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintf("%s/%s %s %q %q", config.OS, config.Architecture, config.Created, config.Config.Entrypoint, config.Config.Cmd)
		if want := fmt.Sprintf("linux/%s %s [\"/usr/local/bin/sluice\"] [\"run\"]", arch, r.date); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
