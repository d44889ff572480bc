package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
)

// unpack writes the files of an archive without compression into a folder.
func unpack(archive, folder string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	r := tar.NewReader(f)
	for {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag == tar.TypeDir {
			err = root.MkdirAll(filepath.Clean(header.Name), 0o755)
		} else {
			err = writeInto(root, header.Name, r)
		}
		if err != nil {
			return err
		}
	}
}

func writeInto(root *os.Root, name string, from io.Reader) error {
	f, err := root.Create(filepath.Clean(name))
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, from); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
