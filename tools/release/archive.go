package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"
)

// file is a file of an archive.
type file struct {
	path string // below the archive's only folder
	mode int64
	data []byte
}

// files returns the content of an architecture's archive.
func (r *release) files(p program, licenses []byte, manual []file) ([]file, error) {
	all := append([]file{{"sluice", 0o755, p.binary}, {"THIRD-PARTY-LICENSES.txt", 0o644, licenses}}, manual...)
	for from, to := range map[string]string{
		"LICENSE": "LICENSE", "README.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md",
		"deploy/systemd/sluice.service": "systemd/sluice.service", "deploy/systemd/sluice.default": "systemd/sluice.default",
	} {
		text, err := os.ReadFile(filepath.Join(r.source, from))
		if err != nil {
			return nil, err
		}
		all = append(all, file{to, 0o644, text})
	}
	return all, nil
}

// filesBelow reads all files below a folder; paths begin there.
func filesBelow(folder string) (files []file, err error) {
	below := os.DirFS(folder)
	err = fs.WalkDir(below, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(below, path)
		files = append(files, file{path, 0o644, data})
		return err
	})
	return files, err
}

// zipped packs files below a folder. Everything belongs to root and has one date, and
// the order is that of the paths.
func zipped(folder string, files []file, date time.Time) ([]byte, error) {
	var out bytes.Buffer
	zip, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	packed, err := pack(folder, files, date)
	if err != nil {
		return nil, err
	}
	if _, err := zip.Write(packed); err != nil {
		return nil, err
	}
	err = zip.Close()
	return out.Bytes(), err
}

// pack is zipped without compression.
func pack(folder string, files []file, date time.Time) ([]byte, error) {
	folders := map[string]bool{}
	for _, f := range files {
		for d := path.Dir(path.Join(folder, f.path)); d != "."; d = path.Dir(d) {
			folders[d] = true
		}
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, d := range slices.Sorted(maps.Keys(folders)) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d + "/", Mode: 0o755, ModTime: date, Format: tar.FormatPAX}); err != nil {
			return nil, err
		}
	}
	for _, f := range slices.SortedFunc(slices.Values(files), func(a, b file) int { return cmp.Compare(a.path, b.path) }) {
		if err := w.WriteHeader(&tar.Header{Name: path.Join(folder, f.path), Mode: f.mode, Size: int64(len(f.data)), ModTime: date, Format: tar.FormatPAX}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}
