package main

import (
	"bytes"
	"context"
	"io"
	"os"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// programPath is where deploy/ expects the program in the image.
const programPath = "usr/local/bin/sluice"

// imageOf returns the image of one architecture: the program and the licenses of what
// is in it. It needs no shell, no libraries, and no nft, iptables or ip.
func (r *release) imageOf(p program) (v1.Image, error) {
	layer, err := pack("", []file{
		{programPath, 0o755, p.binary},
		{"usr/share/doc/sluice/THIRD-PARTY-LICENSES.txt", 0o644, p.licenses},
	}, r.date)
	if err != nil {
		return nil, err
	}
	compressed, err := compressedLayer(layer)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, mutate.Addendum{Layer: compressed, MediaType: types.OCILayer, History: v1.History{
		Created: v1.Time{Time: r.date}, CreatedBy: "tools/release",
	}})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", p.arch, v1.Time{Time: r.date}
	config.Config = v1.Config{
		Entrypoint: []string{"/" + programPath},
		Cmd:        []string{"run"},
		Env:        []string{"PATH=/usr/local/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.title":    "sluice",
			"org.opencontainers.image.version":  r.version,
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.source":   "https://github.com/sluice-proxy/sluice",
		},
	}
	return mutate.ConfigFile(image, config)
}

// compressedLayer returns a layer of an uncompressed archive.
func compressedLayer(packed []byte) (v1.Layer, error) {
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed)), nil }, tarball.WithMediaType(types.OCILayer))
}

// indexOf returns the image for all architectures.
func (r *release) indexOf(programs []program) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range programs {
		image, err := r.imageOf(p)
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: p.arch},
		}})
	}
	return index, nil
}

// imageArchive is the image's file.
func (r *release) imageArchive() string { return "sluice-" + r.version + "-image.tar" }

// writeImage writes the image as an archive of an OCI layout, which containerd, Docker,
// podman and skopeo read.
func (r *release) writeImage(programs []program) (err error) {
	if r.index, err = r.indexOf(programs); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "sluice-image-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	written, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	if err := written.AppendIndex(r.index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": r.version,
		"io.containerd.image.name":          r.image + ":" + r.version,
	})); err != nil {
		return err
	}
	files, err := filesBelow(folder)
	if err != nil {
		return err
	}
	packed, err := pack("", files, r.date)
	if err != nil {
		return err
	}
	return r.write(r.imageArchive(), packed)
}

// push sends the image to a repository of a registry, tagged with the version.
// Credentials are those of docker login.
func (r *release) push(ctx context.Context, repository string) error {
	tag, err := name.NewTag(repository + ":" + r.version)
	if err != nil {
		return err
	}
	return remote.WriteIndex(tag, r.index, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
}
