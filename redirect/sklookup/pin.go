package sklookup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// pin keeps the program attached when the process is killed. The sockets have then
// left its map, so that it refuses what it served, and no server of the host answers
// for a Service (F4). The next process takes over the link and exchanges the program.
type pin struct {
	dir     bpffs.Dir
	missing error // why there is none
	there   bool  // the link is pinned
}

// pinName is that of the link; trialName is that of a program for a moment.
const (
	pinName   = "sk_lookup"
	trialName = "trial"
)

// openPin finds out whether a program can be pinned, by doing so.
func openPin(o *Options, program *ebpf.Program) (p pin) {
	if p.dir, p.missing = bpffs.Of(o.BPFRoot, o.Name, o.Routes.NetNS); p.missing != nil {
		return p
	}
	if p.missing = p.dir.Make(); p.missing != nil {
		return p
	}
	path := p.dir.Pin(trialName)
	_ = os.Remove(path) // of a process that was killed just then
	if p.missing = program.Pin(path); p.missing == nil {
		p.missing = errors.Join(program.Unpin(), sweep(p.dir))
	}
	return p
}

// possible reports whether the link can be pinned.
func (p *pin) possible() bool { return p.missing == nil }

// left returns the link that a killed process left in a network namespace; nil if there
// is none.
func (p *pin) left(namespace int) *link.NetNsLink {
	if p.missing != nil {
		return nil
	}
	l, err := loadPin(p.dir)
	if err != nil {
		return nil
	}
	inode, err := sys.NetNSInode(namespace)
	if err != nil || uint64(inodeOf(l)) != inode {
		_ = l.Close()
		return nil
	}
	return l
}

// loadPin opens the pinned link in a directory. The error is errNoPin if there is none,
// or something else.
func loadPin(dir bpffs.Dir) (*link.NetNsLink, error) {
	l, err := link.LoadPinnedLink(dir.Pin(pinName), nil)
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) {
		return nil, err // this tells nothing about the pin
	}
	if err != nil {
		return nil, errNoPin
	}
	if n, is := l.(*link.NetNsLink); is {
		if info, err := n.Info(); err == nil && info.NetNs() != nil && ebpf.AttachType(info.NetNs().AttachType) == ebpf.AttachSkLookup {
			return n, nil
		}
	}
	_ = l.Close()
	return nil, errNoPin
}

var errNoPin = errors.New("no sk_lookup program is pinned")

// inodeOf returns the number of the network namespace that a link is attached to; 0 if
// it is no longer attached.
func inodeOf(l *link.NetNsLink) uint32 {
	info, err := l.Info()
	if err != nil || info.NetNs() == nil {
		return 0
	}
	return info.NetNs().NetnsInode
}

// keep pins a link, unless it is pinned. It reports whether the pin was gone.
func (p *pin) keep(l *link.NetNsLink) (repaired bool, err error) {
	if !p.possible() || p.there && p.holds(l) {
		return false, nil
	}
	repaired, p.there = p.there, false
	path := p.dir.Pin(pinName)
	_ = l.Unpin()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return repaired, fmt.Errorf("replace a pin: %w", err)
	}
	if err := p.dir.Make(); err != nil {
		return repaired, err
	}
	if err := l.Pin(path); err != nil {
		return repaired, fmt.Errorf("pin the sk_lookup program: %w", err)
	}
	p.there = true
	return repaired, nil
}

// holds reports whether the pin is that of a link. A pin that cannot be read for want of
// descriptors or memory counts as such: a later look finds out.
func (p *pin) holds(l *link.NetNsLink) bool {
	pinned, err := loadPin(p.dir)
	if err != nil {
		return !errors.Is(err, errNoPin)
	}
	defer pinned.Close()
	a, errA := pinned.Info()
	b, errB := l.Info()
	return errA == nil && errB == nil && a.ID == b.ID
}

// remove removes the pin of a link, and detaches the link: the kernel would do that
// somewhat later.
func (p *pin) remove(l *link.NetNsLink) error {
	if !p.possible() || !p.there {
		return nil
	}
	p.there = false
	_ = l.Detach()
	if err := os.Remove(p.dir.Pin(pinName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a pin: %w", err)
	}
	return nil
}

// close removes the directory if nothing is pinned in it.
func (p *pin) close() {
	if p.missing == nil {
		p.dir.Remove()
	}
}

// Cleanup removes the program that a killed process left: Options.BPFRoot, Name and
// Routes.NetNS count. It gives a line for each thing that it removed.
func Cleanup(o Options) (removed []string, err error) {
	if bpffs.Check(o.BPFRoot) != nil {
		return nil, nil //nolint:nilerr // nothing can be pinned there
	}
	dir, err := bpffs.Of(o.BPFRoot, o.Name, o.Routes.NetNS)
	if err != nil {
		return nil, err
	}
	var errs []error
	if l, err := loadPin(dir); err == nil {
		_ = l.Detach() // removing the pin does it somewhat later
		_ = l.Close()
	}
	if err := os.Remove(dir.Pin(pinName)); err == nil {
		removed = append(removed, "BPF link "+dir.Pin(pinName))
	} else if !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("remove a pin: %w", err))
	}
	dir.Remove()
	return removed, errors.Join(append(errs, sweep(dir))...)
}

// sweep removes the pins of network namespaces that are gone, which do nothing.
func sweep(dir bpffs.Dir) error {
	all, err := dir.Siblings()
	for _, d := range all {
		l, err := loadPin(d)
		if err != nil {
			continue
		}
		if inodeOf(l) == 0 {
			_ = os.Remove(d.Pin(pinName))
			d.Remove()
		}
		_ = l.Close()
	}
	return err
}
