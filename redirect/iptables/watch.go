package iptables

import (
	"fmt"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/watch"
)

// pollPeriod is how often the sizes of the legacy variant's tables are looked
// at, of which the kernel tells nobody: six system calls that take a
// microsecond each.
const pollPeriod = 400 * time.Millisecond

// watcher notices when somebody changes rules or routes. Ipsets are looked at
// by Verify alone.
type watcher struct {
	kernel  *watch.Watcher // routes, and tables of the nft variant
	tables  []*sys.XTables // of the legacy variant, by family
	changed chan struct{}
	closed  chan struct{}
	running sync.WaitGroup
}

var _ redirect.Notifier = (*Redirector)(nil)

func openWatcher(t *tools) (*watcher, error) {
	w := &watcher{changed: make(chan struct{}, 1), closed: make(chan struct{})}
	o := watch.Options{NetNS: t.ns.fd()}
	if t.variant == NFT {
		o.Tables = tableNames[:]
	}
	var err error
	if w.kernel, err = watch.Open(o); err != nil {
		return nil, err
	}
	if t.variant == NFT {
		return w, nil
	}
	families := [versions]bool{v4: true, v6: t.ns.hasFamily(v6)}
	err = t.ns.do(func() error {
		for v := range versions {
			if !families[v] {
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
		w.close()
		return nil, err
	}
	w.running.Add(1)
	go w.poll()
	return w, nil
}

// Changed gives a value when rules or routes may not be as they were; see
// [redirect.Notifier].
func (r *Redirector) Changed() <-chan struct{} { return r.watcher.changes() }

func (w *watcher) changes() <-chan struct{} {
	if w.tables == nil {
		return w.kernel.Changed()
	}
	return w.changed
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
func (w *watcher) poll() {
	defer w.running.Done()
	tick := time.NewTicker(pollPeriod)
	defer tick.Stop()
	last := w.look()
	for {
		select {
		case <-w.closed:
			return
		case <-w.kernel.Changed():
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
	close(w.closed)
	w.running.Wait()
	w.kernel.Close()
	for _, x := range w.tables {
		_ = x.Close()
	}
}
