package demo

import (
	"embed"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// objects are the demo's manifests. Those below objects/changed take the place of
// others during the story.
//
//go:embed objects
var objects embed.FS

// shopService is a Service of the demo. All are in the namespace "shop" and have
// the one port http, 80.
type shopService struct {
	name   string
	number int // the last digits of its cluster IPs
}

const (
	manifestNamespace = "shop"
	servicePort       = 80
)

// vip returns the cluster IP of a family, with the port.
func (s *shopService) vip(f service.Family) netip.AddrPort {
	return netip.AddrPortFrom(host(serviceCIDRs[f], s.number), servicePort)
}

// String returns the name as records give it, without the port.
func (s *shopService) String() string { return manifestNamespace + "/" + s.name }

// file returns the name of the service's manifest.
func (s *shopService) file() string { return s.name + ".yaml" }

// manifestDir is the directory that the proxy reads.
type manifestDir struct {
	path string
	ipv6 bool
}

// fill makes the directory and writes everything.
func (d *manifestDir) fill() error {
	if err := os.Mkdir(d.path, 0o700); err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	names, err := fs.Glob(objects, "objects/*.yaml")
	if err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	for _, name := range names {
		if err := d.put(name); err != nil {
			return err
		}
	}
	return nil
}

// change puts a service's later manifest in the place of its first.
func (d *manifestDir) change(svc *shopService) error { return d.put("objects/changed/" + svc.file()) }

// put writes a manifest as an editor does: a new file, renamed into place.
func (d *manifestDir) put(name string) error {
	text, err := objects.ReadFile(name)
	if err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	if !d.ipv6 {
		text = []byte(withoutIPv6(string(text)))
	}
	base := path.Base(name)
	draft := filepath.Join(d.path, "."+base+".draft")
	if err := os.WriteFile(draft, text, 0o600); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	if err := os.Rename(draft, filepath.Join(d.path, base)); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	return nil
}

// withoutIPv6 leaves out slices of IPv6 addresses, and list items that are such
// addresses or ranges.
func withoutIPv6(text string) string {
	var kept []string
	for document := range strings.SplitSeq(text, "---\n") {
		if strings.Contains(document, "addressType: IPv6") {
			continue
		}
		var b strings.Builder
		for line := range strings.Lines(document) {
			if !strings.Contains(line, "fd00:") {
				b.WriteString(line)
			}
		}
		kept = append(kept, b.String())
	}
	return strings.Join(kept, "---\n")
}
