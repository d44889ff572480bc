package flow

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/bpffs"
	"github.com/sluice-proxy/sluice/test/must"
)

// loaded are pinned maps and programs that tests no longer need. The next test that wants as many
// flows gets them, emptied: loading and verifying programs takes most of these tests' CPU time.
var loaded struct {
	sync.Mutex
	root   string // a BPF file system
	closer func()
	made   int
	free   map[int][]*bpf.Pins // by their number of flows
}

// openLoaded is bpf.Open for a Server without pins. The caller may release it when no program is
// attached any more.
func openLoaded(flows int) (k *bpf.Kernel, release func(), err error) {
	p, err := takeLoaded(flows)
	if err != nil {
		return nil, nil, err
	}
	if k, err = bpf.Open(flows, p); err != nil {
		return nil, nil, err
	}
	if err := empty(k); err != nil {
		return nil, nil, err
	}
	k.Control.Netns = p.Netns
	return k, func() {
		loaded.Lock()
		defer loaded.Unlock()
		loaded.free[flows] = append(loaded.free[flows], p)
	}, nil
}

// takeLoaded returns pins that nobody uses.
func takeLoaded(flows int) (p *bpf.Pins, err error) {
	loaded.Lock()
	defer loaded.Unlock()
	if free := loaded.free[flows]; len(free) > 0 {
		loaded.free[flows] = free[:len(free)-1]
		return free[len(free)-1], nil
	}
	if loaded.free == nil {
		if loaded.root, loaded.closer, err = bpffs.Open(); err != nil {
			return nil, err
		}
		loaded.free = make(map[int][]*bpf.Pins)
	}
	loaded.made++
	return bpf.OpenPins(loaded.root, fmt.Sprint("loaded", loaded.made), 0, flows)
}

// closeLoaded lets go of all of them.
func closeLoaded() {
	if loaded.closer != nil {
		loaded.closer()
	}
}

// empty brings maps to the state of a first start, except the seed, a constant of the programs.
func empty(k *bpf.Kernel) error {
	clear(k.Flows)
	clear(k.Index.Buckets)
	clear(k.Loads)
	*k.Control = bpf.KernelControl{Seed: k.Control.Seed} // no spares, whatever is in their ring
	maps := reflect.ValueOf(k.Maps)
	for i := range maps.NumField() {
		var err error
		switch m := maps.Field(i).Interface().(*ebpf.Map); m.Type() {
		case ebpf.Array: // in memory, or constant
		case ebpf.PerCPUArray:
			zero := slices.Repeat([][]byte{make([]byte, m.ValueSize())}, ebpf.MustPossibleCPU())
			for key := range m.MaxEntries() {
				err = errors.Join(err, m.Put(key, zero))
			}
		case ebpf.RingBuf:
			err = drain(m)
		default:
			err = removeAll(m)
		}
		if err != nil {
			return fmt.Errorf("empty %s: %w", maps.Type().Field(i).Name, err)
		}
	}
	return nil
}

// drain reads all events of a ring.
func drain(m *ebpf.Map) error {
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return err
	}
	defer r.Close()
	r.SetDeadline(time.Unix(1, 0))
	for err == nil {
		_, err = r.Read()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// removeAll removes all elements of a map.
func removeAll(m *ebpf.Map) error {
	for {
		key, err := m.NextKeyBytes(nil)
		if err != nil || key == nil {
			return err
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
}

// What a test leaves in maps, the next one does not find.
func TestLoadedMapsAreEmptied(t *testing.T) {
	requireRoot(t)
	k, release, err := openLoaded(4)
	must.OK(t, err)
	defer release()
	defer k.Close()
	lists := func(each func(name string, m *ebpf.Map)) {
		maps := reflect.ValueOf(k.Maps)
		for i := range maps.NumField() {
			if m := maps.Field(i).Interface().(*ebpf.Map); m.Type() != ebpf.Array && m.Type() != ebpf.RingBuf {
				each(maps.Type().Field(i).Name, m)
			}
		}
	}
	lists(func(name string, m *ebpf.Map) {
		value := any(make([]byte, m.ValueSize()))
		if m.Type() == ebpf.PerCPUArray {
			value = slices.Repeat([][]byte{slices.Repeat([]byte{1}, int(m.ValueSize()))}, ebpf.MustPossibleCPU())
		}
		must.OKf(t, m.Put(make([]byte, m.KeySize()), value), "%s", name)
	})
	k.Flows[1].State, k.Index.Buckets[1].Slot[0], k.Loads[1].Opened, k.Control.Given = 1, 1, 1, 1
	must.OK(t, empty(k))
	lists(func(name string, m *ebpf.Map) {
		if m.Type() == ebpf.PerCPUArray {
			var values [][]byte
			if err := m.Lookup(make([]byte, 4), &values); err != nil || bytes.Trim(values[0], "\x00") != nil {
				t.Errorf("%s: %v, %v", name, values, err)
			}
		} else if key, err := m.NextKeyBytes(nil); key != nil || err != nil {
			t.Errorf("%s: %x, %v", name, key, err)
		}
	})
	if k.Flows[1] != (bpf.KernelFlow{}) || k.Index.Buckets[1] != (bpf.KernelBucket{}) || k.Loads[1] != (bpf.KernelLoad{}) || k.Control.Given != 0 || k.Control.Seed == 0 {
		t.Errorf("%+v, %+v, %+v, %+v", k.Flows[1], k.Index.Buckets[1], k.Loads[1], *k.Control)
	}
}
