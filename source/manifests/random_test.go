package manifests

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// fresh returns what a Watcher that starts now finds, and whether an object is in
// several files: then the order in which they came decides.
func fresh(t *testing.T, dir string) (objects map[string]string, disputed func(object string) bool) {
	t.Helper()
	b := &bench{t: t, news: make(chan struct{}), objects: make(map[string]string)}
	ctx, cancel := context.WithCancel(context.Background())
	w := New(dir, Options{})
	err := w.Run(ctx, func(c service.Change) {
		b.apply(c)
		cancel()
	})
	must.OK(t, err)
	return b.objects, func(object string) bool {
		for k, claims := range w.catalog.claims {
			mirrored := k.kind == kindEndpoints && strings.HasPrefix(object, "EndpointSlice "+k.Name.String()+"-mirror-")
			if len(claims) > 1 && (object == k.String() || mirrored) {
				return true
			}
		}
		return false
	}
}

// mess does something to a directory tree, whatever is there.
type mess struct {
	rnd  *rand.Rand
	root string
}

func (m *mess) dir() string {
	d := m.root
	for range m.rnd.IntN(3) {
		d = filepath.Join(d, string(rune('p'+m.rnd.IntN(3))))
	}
	return d
}

func (m *mess) file() string {
	return filepath.Join(m.dir(), fmt.Sprintf("f%d.yaml", m.rnd.IntN(4)))
}

func (m *mess) text() string {
	name, n := fmt.Sprintf("s%d", m.rnd.IntN(6)), m.rnd.IntN(200)+1
	switch m.rnd.IntN(4) {
	case 0:
		return eps(name, fmt.Sprintf("10.1.0.%d", n))
	case 1:
		return slc(name, name+"-1", fmt.Sprintf("10.1.1.%d", n))
	case 2:
		return svc(name, fmt.Sprintf("10.96.0.%d", n)) + "---\n" + slc(name, name+"-2", fmt.Sprintf("10.1.2.%d", n))
	}
	return svc(name, fmt.Sprintf("10.96.0.%d", n))
}

// step does one thing; that it fails because there is nothing to do it to is
// part of the mess.
func (m *mess) step() {
	switch m.rnd.IntN(10) {
	case 0:
		_ = os.MkdirAll(m.dir(), 0o755)
	case 1:
		_ = os.Rename(m.dir(), m.dir())
	case 2:
		if d := m.dir(); d != m.root {
			_ = os.RemoveAll(d)
		}
	case 3:
		_ = os.Remove(m.file())
	case 4:
		_ = os.Rename(m.file(), m.file())
	case 5:
		_ = os.Symlink(m.file(), m.file())
	case 6:
		_ = os.Symlink(m.dir(), m.dir())
	case 7, 8:
		name := m.file()
		_ = os.WriteFile(name+".new", []byte(m.text()), 0o644)
		_ = os.Rename(name+".new", name)
	default:
		_ = os.WriteFile(m.file(), []byte(m.text()), 0o644)
	}
}

// mend takes away the symlinks that lead nowhere: a file that becomes one keeps
// its last good content, of which a fresh watcher knows nothing.
func (m *mess) mend() {
	_ = filepath.WalkDir(m.root, func(name string, _ fs.DirEntry, _ error) error {
		if _, err := os.Stat(name); err != nil {
			_ = os.Remove(name)
		}
		return nil
	})
}

// Whatever is done to a tree of directories, files and symlinks, the watcher
// comes to what one that is started afterwards finds, by events alone.
func TestRandomChangesOfTheTree(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			m := mess{rand.New(rand.NewPCG(seed, 1)), t.TempDir()}
			b := start(t, m.root)
			for round := range 25 {
				for range m.rnd.IntN(30) + 1 {
					m.step()
				}
				m.mend()
				want, disputed := fresh(t, m.root)
				b.until(fmt.Sprintf("round %d: %v", round, want), func() bool {
					return maps.EqualFunc(want, b.objects, func(_, _ string) bool { return true }) &&
						!slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(o string) bool { return want[o] != b.objects[o] && !disputed(o) })
				})
			}
		})
	}
}
