package node

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// keptDrains keeps what an operator drains for the next process, in a BPF map that is pinned
// while anything is drained: pods of a DaemonSet have a new file system at each start, and
// this one of the host. It implements serve.Keeper.
type keptDrains struct {
	dir bpffs.Dir
	pin string
}

// drainsPrefix begins the names of pins; the cookie of the network namespace follows.
const drainsPrefix = "drained_"

// keptDrain is a key of the map. Its value is when the drain began, in Unix ns.
type keptDrain struct {
	Addr [16]byte
	Port uint16
	Pod  [318]byte // namespace/name, which has at most 317 bytes
}

// noPrealloc is BPF_F_NO_PREALLOC: memory for what is drained alone.
const noPrealloc = 1

var keptDrainsSpec = &ebpf.MapSpec{
	Name: "sluice_drained", Type: ebpf.Hash, KeySize: 16 + 2 + 318, ValueSize: 8, MaxEntries: serve.MaxDrains,
	Flags: noPrealloc,
}

// openDrains returns where drains are kept; the error says why they cannot be.
func openDrains(root, proxy string) (*keptDrains, error) {
	dir, err := bpffs.Of(root, proxy, 0)
	if err != nil {
		return nil, err
	}
	cookie, err := sys.NetNSCookie(0)
	if err != nil {
		return nil, err
	}
	return &keptDrains{dir: dir, pin: dir.Pin(fmt.Sprintf("%s%x", drainsPrefix, cookie))}, nil
}

// Load returns what an earlier process has kept.
func (k *keptDrains) Load() (map[policy.Drain]time.Time, error) {
	m, err := ebpf.LoadPinnedMap(k.pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // nothing is drained
	}
	if err != nil {
		return nil, fmt.Errorf("drained endpoints: %w", err)
	}
	defer m.Close()
	all := make(map[policy.Drain]time.Time)
	var key keptDrain
	var since int64
	entries := m.Iterate()
	for entries.Next(&key, &since) {
		d := policy.Drain{Addr: netip.AddrPortFrom(netip.AddrFrom16(key.Addr).Unmap(), key.Port)}
		d.Pod.Namespace, d.Pod.Name, _ = strings.Cut(strings.TrimRight(string(key.Pod[:]), "\x00"), "/")
		all[d] = time.Unix(0, since)
	}
	return all, entries.Err()
}

// Save keeps what is drained now.
func (k *keptDrains) Save(all map[policy.Drain]time.Time) error {
	if len(all) == 0 {
		_, err := removeDrains(k.dir)
		return err
	}
	if err := k.dir.Make(); err != nil {
		return fmt.Errorf("drained endpoints: %w", err)
	}
	m, err := ebpf.NewMap(keptDrainsSpec)
	if err != nil {
		return fmt.Errorf("drained endpoints: %w", err)
	}
	defer m.Close()
	for d, since := range all {
		key := keptDrain{Addr: d.Addr.Addr().As16(), Port: d.Addr.Port()}
		if d.Pod != (service.Name{}) {
			copy(key.Pod[:], d.Pod.String())
		}
		if err := m.Put(&key, since.UnixNano()); err != nil {
			return fmt.Errorf("drained endpoints: %w", err)
		}
	}
	if err := os.Remove(k.pin); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("drained endpoints: %w", err)
	}
	return m.Pin(k.pin)
}

// CleanupDrains removes what a proxy has kept of drains, also of an earlier network namespace
// with the same number. It reports whether there was anything.
func CleanupDrains(root, proxy string) (removed bool, err error) {
	dir, err := bpffs.Of(root, proxy, 0)
	if err != nil {
		return false, nil //nolint:nilerr // nothing can be kept there
	}
	return removeDrains(dir)
}

func removeDrains(dir bpffs.Dir) (removed bool, err error) {
	pins, err := filepath.Glob(dir.Pin(drainsPrefix + "*"))
	for _, pin := range pins {
		err = errors.Join(err, os.Remove(pin))
	}
	dir.Remove()
	return len(pins) > 0, err
}

// openDrains puts in force, from the first configuration on, what an earlier process has drained.
func (p *Proxy) openDrains() {
	if p.config.AdminSocket == Off { // nobody could take them back
		p.drains = serve.NewDrains(p.drain, nil)
		return
	}
	kept, why := openDrains(p.config.Steering.BPFRoot, p.config.Steering.Table)
	if why != nil {
		p.log.Debug().Err(why).Msg("a restart forgets what is drained")
		p.drains = serve.NewDrains(p.drain, nil)
		return
	}
	p.drains = serve.NewDrains(p.drain, kept)
	p.loadDrains()
}

// loadDrains reads what an earlier process drained. The next policy goes by it.
func (p *Proxy) loadDrains() {
	set, err := p.drains.Load()
	if err != nil {
		p.log.Warn().Err(err).Msg("what an earlier process has drained is not known")
	}
	if maps.Equal(set, p.policy.Drained) {
		return
	}
	p.policy.Drained = set
	p.log.Info().Int("addresses", len(set)).Msg("endpoints that an operator drained are still drained; sluice drain lists them")
}
