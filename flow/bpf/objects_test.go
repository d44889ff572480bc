package bpf

import (
	"os"
	"testing"
	"unsafe"

	"github.com/sluice-proxy/sluice/test/bpfobject"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestObjectsAreWhatTheSourcesGive(t *testing.T) { bpfobject.Check(t) }

// TestSizes keeps what an open flow costs in view, and that array elements lie one behind
// the other in memory (the kernel rounds their size to 8).
func TestSizes(t *testing.T) {
	if size := unsafe.Sizeof(KernelFlow{}); size != 256 {
		t.Errorf("a flow has %d bytes", size)
	}
	if size := unsafe.Sizeof(KernelBucket{}); size != 64 {
		t.Errorf("a bucket has %d bytes, no cache line", size)
	}
	if size := unsafe.Sizeof(KernelLoad{}); size != 56 {
		t.Errorf("a load has %d bytes", size)
	}
	if size := unsafe.Sizeof(KernelControl{}); size != 128 {
		t.Errorf("control has %d bytes", size)
	}
}

func TestKernelLoads(t *testing.T) {
	requireRoot(t)
	k := must.Get(Open(1000, nil))(t)
	defer k.Close()
	if len(k.Flows) != 1001 || int(k.Maps.Flows.ValueSize()) != int(unsafe.Sizeof(KernelFlow{})) {
		t.Errorf("%d flows of %d bytes", len(k.Flows), k.Maps.Flows.ValueSize())
	}
}

// requireRoot skips a test that loads BPF programs.
func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, to load BPF programs")
	}
}
