package bpf

import (
	"crypto/sha256"
	_ "embed" // for layout.h
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// What a process leaves behind depends on these: the maps' layout, and how the index finds it.
var (
	//go:embed layout.h
	layoutText string
	//go:embed index.h
	indexText string
)

// pinPrefix begins the names of all pins of this package.
const pinPrefix = "flow_"

// Pins is where maps, programs and links stay when the process ends, so that forwarded connections
// go on and the next process adopts them. Their names have a version: what the maps hold,
// and how much. A process leaves those of another version alone, whose programs go on for
// their connections, until RemoveOthers.
type Pins struct {
	dir     bpffs.Dir
	version string
	Netns   uint64 // KernelControl's
}

// OpenPins returns the pins of a proxy in a network namespace. An error says why nothing
// can be pinned.
func OpenPins(root, proxy string, namespace, flows int) (*Pins, error) {
	dir, err := bpffs.Of(root, proxy, namespace)
	if err != nil {
		return nil, err
	}
	if err := dir.Make(); err != nil {
		return nil, fmt.Errorf("pins: %w", err)
	}
	netns, err := sys.NetNSCookie(namespace)
	if err != nil {
		return nil, err
	}
	return &Pins{dir: dir, Netns: netns, version: layoutVersion(layoutText+indexText) + "_" + strconv.Itoa(flows)}, nil
}

// layoutVersion is a hash of what the compiler sees of the layout.
func layoutVersion(text string) string {
	var code strings.Builder
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "//")
		code.WriteString(strings.Join(strings.Fields(line), " "))
	}
	hash := sha256.Sum256([]byte(code.String()))
	return hex.EncodeToString(hash[:4])
}

// path returns the path of a pin.
func (p *Pins) path(what string) string { return p.dir.Pin(pinPrefix + p.version + "_" + what) }

// LinkPath returns the path of the link at a hook of an interface.
func (p *Pins) LinkPath(hook string, index int) string {
	return p.path(hook + "_" + strconv.Itoa(index))
}

// maps opens the pinned maps, if all that a spec has are there and fit. Otherwise it
// removes them, and links that use them.
func (p *Pins) maps(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	found := make(map[string]*ebpf.Map)
	for name, s := range spec.Maps {
		if !isOwnMap(name) {
			continue
		}
		m, err := ebpf.LoadPinnedMap(p.path(name), nil)
		if err == nil {
			found[name] = m
			err = s.Compatible(m)
		}
		if err == nil && name == KernelMapControls {
			err = p.checkNamespace(m)
		}
		if err != nil {
			for _, m := range found {
				_ = m.Close()
			}
			_, _ = removePins(p.dir, func(name string) bool { return strings.HasPrefix(name, pinPrefix+p.version+"_") })
			return nil
		}
	}
	return found
}

// checkNamespace returns an error if the pins are of a network namespace that is gone. The
// directory has the number of the namespace's inode, which the kernel gives to later ones.
func (p *Pins) checkNamespace(controls *ebpf.Map) error {
	var c KernelControl
	if err := controls.Lookup(uint32(0), &c); err != nil {
		return err
	}
	if c.Netns != p.Netns {
		return errors.New("of another network namespace")
	}
	return nil
}

// isOwnMap reports whether a map is of maps.h, and not one of the compiler's.
func isOwnMap(name string) bool { return !strings.HasPrefix(name, ".") }

// RemoveOthers removes the pins of other versions.
func (p *Pins) RemoveOthers() error {
	_, err := removePins(p.dir, func(name string) bool { return !strings.HasPrefix(name, pinPrefix+p.version+"_") })
	return err
}

// DisarmOthers keeps programs of other versions from deciding about new flows: they would go by
// the Services of their time.
func (p *Pins) DisarmOthers() {
	own := pinPrefix + p.version + "_"
	for _, name := range pinNames(p.dir) {
		if strings.HasPrefix(name, own) || !strings.HasSuffix(name, "_"+KernelMapDestinations) {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(string(p.dir), name), nil)
		if err != nil {
			continue
		}
		for {
			key, err := m.NextKeyBytes(nil)
			if err != nil || key == nil || m.Delete(key) != nil {
				break
			}
		}
		_ = m.Close()
	}
}

// HasOthers reports whether another version has pins.
func (p *Pins) HasOthers() bool {
	return slices.ContainsFunc(pinNames(p.dir), func(name string) bool { return !strings.HasPrefix(name, pinPrefix+p.version+"_") })
}

// Remove removes all pins of the directory, of other versions too, and the directory.
func (p *Pins) Remove() {
	_, _ = RemovePins(p.dir)
	p.dir.Remove()
}

// RemovePins removes all pins of this package from a directory, and returns how many there were.
func RemovePins(dir bpffs.Dir) (int, error) {
	return removePins(dir, func(string) bool { return true })
}

// pinNames lists this package's pins in a directory.
func pinNames(dir bpffs.Dir) (names []string) {
	entries, err := os.ReadDir(string(dir))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), pinPrefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

// removePins removes some pins and detaches links at once: the kernel would do that
// somewhat later.
func removePins(dir bpffs.Dir, which func(name string) bool) (n int, err error) {
	var errs []error
	for _, name := range pinNames(dir) {
		if !which(name) {
			continue
		}
		path := filepath.Join(string(dir), name)
		if l, err := link.LoadPinnedLink(path, nil); err == nil { // else it is a map or a program
			_ = l.Detach()
			_ = l.Close()
		}
		if err := os.Remove(path); err == nil {
			n++
		} else if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return n, errors.Join(errs...)
}
