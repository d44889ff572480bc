// Command release builds what is published of a version: for each architecture an
// archive with the program, its manual and its unit, and an SBOM; an image for all of
// them; the Helm chart; and checksums. It needs Go and git, but no Docker daemon. The
// same commit and the same Go give the same bytes.
//
//	release -source . -out dist -version v0.1.0 [-push registry.example.com/sluice]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// release is one version that is built.
type release struct {
	source  string // the repository
	out     string // where the results go
	version string
	date    time.Time // of everything: that of the commit
	arches  []string
	image   string        // the image's name, without a tag
	index   v1.ImageIndex // the image, once it is built
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	r := release{}
	flag.StringVar(&r.source, "source", ".", "the repository")
	flag.StringVar(&r.out, "out", "dist", "folder for the results; it is emptied")
	flag.StringVar(&r.version, "version", "", "version, as git describe has it")
	flag.StringVar(&r.image, "image", "docker.io/library/sluice", "name of the image in its archive, without a tag")
	arches := flag.String("arch", "amd64,arm64", "architectures")
	push := flag.String("push", "", "also push the image to this repository of a registry")
	flag.Parse()
	r.arches = strings.Split(*arches, ",")
	if r.version == "" {
		return fmt.Errorf("-version is missing")
	}
	var err error
	if r.date, err = commitDate(ctx, r.source); err != nil {
		return err
	}
	if err := r.build(ctx); err != nil {
		return err
	}
	if *push != "" {
		return r.push(ctx, *push)
	}
	return nil
}

// commitDate returns the time of the last commit, or that of SOURCE_DATE_EPOCH.
func commitDate(ctx context.Context, source string) (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.CommandContext(ctx, "git", "-C", source, "log", "-1", "--format=%ct").Output()
		if err != nil {
			return time.Time{}, fmt.Errorf("git log: %w; SOURCE_DATE_EPOCH can say the date", err)
		}
		text = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %q is not a number of seconds", text)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// build writes all results.
func (r *release) build(ctx context.Context) error {
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	manual, err := r.manual(ctx)
	if err != nil {
		return err
	}
	var programs []program
	for _, arch := range r.arches {
		p, err := r.program(ctx, arch)
		if err != nil {
			return err
		}
		programs = append(programs, p)
		licenses, err := r.licenses(ctx, p)
		if err != nil {
			return err
		}
		bill, err := r.bill(p)
		if err != nil {
			return err
		}
		if err := r.write(r.name(arch)+".spdx.json", bill); err != nil {
			return err
		}
		programs[len(programs)-1].licenses = licenses
		files, err := r.files(p, licenses, manual)
		if err != nil {
			return err
		}
		archive, err := zipped(r.name(arch), files, r.date)
		if err != nil {
			return err
		}
		if err := r.write(r.name(arch)+".tar.gz", archive); err != nil {
			return err
		}
	}
	if err := r.writeImage(programs); err != nil {
		return err
	}
	if err := r.writeChart(); err != nil {
		return err
	}
	return r.writeSums()
}

// name is that of an architecture's archive.
func (r *release) name(arch string) string { return "sluice-" + r.version + "-linux-" + arch }

func (r *release) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(r.out, name), data, 0o644)
}
