package bpf

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// openIDs opens a Kernel, closes it, and returns its programs' identifiers.
func openIDs(t *testing.T, p *Pins) (ids [4]ebpf.ProgramID) {
	t.Helper()
	k := must.Get(Open(1000, p))(t)
	defer k.Close()
	k.Control.Netns = p.Netns
	bare := must.Get(k.Bare())(t)
	for i, program := range []*ebpf.Program{k.Ethernet.Ingress, k.Ethernet.Egress, bare.Ingress, bare.Egress} {
		info := must.Get(program.Info())(t)
		ids[i], _ = info.ID()
	}
	return ids
}

// A start with the build that has pinned its programs loads none. Everything else that is pinned
// at their places is replaced.
func TestProgramsOfTheSameBuildAreTakenOver(t *testing.T) {
	p := must.Get(OpenPins(netns.MountBPF(t), "test", 0, 1000))(t)
	t.Cleanup(p.Remove)
	ingress, other := p.programPath(ethernetHeader, "ingress"), p.path(programPin+"0123456789abcdef_14_ingress")
	first := openIDs(t, p)
	check.Equalf(t, openIDs(t, p), first, "programs, before %v", first)
	pin := func(path string, o interface{ Pin(string) error }) {
		t.Helper()
		_ = os.Remove(path)
		must.OK(t, o.Pin(path))
	}
	differ := func(what string, before [4]ebpf.ProgramID) (after [4]ebpf.ProgramID) {
		t.Helper()
		after = openIDs(t, p)
		for i := range 2 { // those for Ethernet
			if after[i] == before[i] {
				t.Errorf("%s: program %d was taken over", what, after[i])
			}
		}
		check.Equalf(t, openIDs(t, p), after, "%s: programs, before %v", what, after)
		return after
	}

	// Another build's: this one's are gone, and the other's go.
	program := must.Get(ebpf.LoadPinnedProgram(ingress, nil))(t)
	pin(other, program)
	_ = os.Remove(ingress)
	second := differ("another build", first)
	if _, err := os.Stat(other); !os.IsNotExist(err) {
		t.Errorf("the other build's program stays: %v", err)
	}

	// A program of ours that uses other maps.
	foreign := must.Get(Open(10, nil))(t)
	defer foreign.Close()
	pin(ingress, foreign.Ethernet.Ingress)
	second = differ("other maps", second)

	// Something else.
	m := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}))(t)
	defer m.Close()
	pin(ingress, m)
	second = differ("a map", second)

	// Without their maps, the programs are of no use.
	for _, name := range pinNames(p.dir) {
		if strings.HasSuffix(name, "_"+KernelMapFlows) {
			_ = os.Remove(p.dir.Pin(name))
		}
	}
	third := openIDs(t, p)
	for i := range third {
		if third[i] == second[i] {
			t.Errorf("program %d was taken over without its maps", third[i])
		}
	}
}

// The programs for interfaces without a link header are loaded when they are asked for, and pinned for
// the next process.
func TestProgramsForTunnelsAreLoadedLater(t *testing.T) {
	p := must.Get(OpenPins(netns.MountBPF(t), "test", 0, 1000))(t)
	t.Cleanup(p.Remove)
	k := must.Get(Open(1000, p))(t)
	defer k.Close()
	pin := p.programPath(0, "egress")
	if _, err := os.Stat(pin); !os.IsNotExist(err) {
		t.Errorf("nobody has asked for it: %v", err)
	}
	first := must.Get(k.Bare())(t)
	must.OK(t, must.Err(os.Stat(pin)))
	again := must.Get(k.Bare())(t)
	check.Equalf(t, again, first, "programs")
}

// BenchmarkStart measures what maps and programs cost at a start: the first one, and one after a
// process of the same build or of another one.
func BenchmarkStart(b *testing.B) {
	for name, removed := range map[string]string{"first": pinPrefix, "same build": "none", "other build": programPin} {
		b.Run(name, func(b *testing.B) {
			p := must.Get(OpenPins(netns.MountBPF(b), "test", 0, 1000))(b)
			b.Cleanup(p.Remove)
			var used time.Duration
			for i := range b.N + 1 {
				_, _ = removePins(p.dir, func(pin string) bool { return strings.Contains(pin, removed) })
				before := cpuTime()
				if i == 1 {
					b.ResetTimer()
				}
				k := must.Get(Open(1000, p))(b)
				k.Control.Netns = p.Netns
				if i > 0 {
					used += cpuTime() - before
				}
				k.Close()
			}
			b.ReportMetric(float64(used.Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
