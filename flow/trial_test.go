package flow

import (
	"testing"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestTrial: a trial passes here, leaves nothing, and finds programs that do not translate.
func TestTrial(t *testing.T) {
	requireRoot(t)
	k := must.Get(bpf.Open(4, nil))(t)
	defer k.Close()
	k.Control.Magic = 1 << bpf.FlowBits
	for range 2 {
		must.OK(t, try(k, 2))
	}
	for i, b := range k.Index.Buckets {
		check.Equalf(t, b, bpf.KernelBucket{}, "bucket %d", i)
	}
	check.Equalf(t, k.Flows[2].State, bpf.KernelStateFREE, "the flow is left in state")
	k.Ethernet.Ingress, k.Ethernet.Egress = k.Ethernet.Egress, k.Ethernet.Ingress
	check.Errorf(t, try(k, 2), "puts back", "with the programs exchanged")
	k.Ethernet.Ingress, k.Ethernet.Egress = k.Ethernet.Egress, k.Ethernet.Ingress
	for i := range k.Index.Buckets {
		for j := range k.Index.Buckets[i].Slot {
			k.Index.Buckets[i].Slot[j] = 1<<63 | bpf.MostFlows
		}
	}
	check.Errorf(t, try(k, 2), "puts back", "with no room for tuples")
}

// A Server tries its programs also with maps that nobody has used yet, and leaves them as they were.
func TestStartTriesThePrograms(t *testing.T) {
	n := newNode(t, netns.NewLab(t, 0), nil)
	var begun uint32
	for i := range n.server.kernel.Flows {
		k := &n.server.kernel.Flows[i]
		begun += k.Generation
		check.Equalf(t, k.State, bpf.KernelStateFREE, "flow %d is left in state", i)
	}
	check.Equalf(t, begun, uint32(len(trialAddresses)), "connections were tried")
	if got, want := n.server.kernel.Spares.Len(), len(n.server.kernel.Flows)-1; got != want || n.entries() != 0 {
		t.Errorf("%d indices are spare of %d, and the index has %d entries", got, want, n.entries())
	}
}

// TestTry: it works whether the node forwards packets or not, which may change.
func TestTry(t *testing.T) {
	lab := netns.NewLab(t, 0)
	check.OK(t, lab.Node.Do(Try))
	for _, file := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must.OK(t, lab.Node.SetSysctl(file, "0"))
	}
	check.OK(t, lab.Node.Do(Try))
}
