package iptables

import (
	"fmt"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect/watch"
)

// pollPeriod is how often the sizes of the legacy variant's tables are looked
// at, of which the kernel tells nobody: six system calls that take a
// microsecond each.
const pollPeriod = 400 * time.Millisecond

// watcher notices when somebody changes rules of the legacy variant, of which the
// kernel does not tell. Ipsets are looked at by Verify alone.
type watcher struct {
	tables  []*sys.XTables // by family; none for the nft variant
	changed chan struct{}
	closed  chan struct{}
	running sync.WaitGroup
}

// watchOptions say what the kernel tells of: routes, and tables of the nft variant.
func watchOptions(t *tools) watch.Options {
	o := watch.Options{NetNS: t.ns.fd()}
	if t.variant == NFT {
		o.Tables = tableNames[:]
	}
	return o
}

// open begins to watch, and passes on what the kernel tells of.
func (w *watcher) open(t *tools, kernel <-chan struct{}) error {
	if t.variant == NFT {
		return nil
	}
	w.changed, w.closed = make(chan struct{}, 1), make(chan struct{})
	hasIPv6 := t.ns.hasFamily(v6)
	err := t.ns.do(func() error {
		for v := range versions {
			if v == v6 && !hasIPv6 {
				continue
			}
			x, err := sys.OpenXTables(v == v6)
			if err != nil {
				return fmt.Errorf("watch iptables: %w", err)
			}
			w.tables = append(w.tables, x)
		}
		return nil
	})
	if err != nil {
		return err
	}
	w.running.Add(1)
	go w.poll(kernel)
	return nil
}

// Changed gives a value when rules or routes may not be as they were; see
// [redirect.Redirector].
func (r *Redirector) Changed() <-chan struct{} {
	if r.watcher.changed != nil {
		return r.watcher.changed
	}
	return r.Core.Changed()
}

// sizes is what is looked at: by family and table.
type sizes [versions][3]sys.XTablesInfo

func (w *watcher) look() (s sizes) {
	for i, x := range w.tables {
		for j, name := range tableNames {
			s[i][j], _ = x.Info(name) // zero where there is no table
		}
	}
	return s
}

// poll tells of changes to the legacy variant's tables, and passes the
// kernel's notifications on.
func (w *watcher) poll(kernel <-chan struct{}) {
	defer w.running.Done()
	tick := time.NewTicker(pollPeriod)
	defer tick.Stop()
	last := w.look()
	for {
		select {
		case <-w.closed:
			return
		case <-kernel:
		case <-tick.C:
			now := w.look()
			if now == last {
				continue
			}
			last = now
		}
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

func (w *watcher) close() {
	if w.closed != nil {
		close(w.closed)
	}
	w.running.Wait()
	for _, x := range w.tables {
		_ = x.Close()
	}
}
