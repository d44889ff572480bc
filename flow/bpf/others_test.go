package bpf

import (
	"bytes"
	"encoding/binary"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// What another version's maps hold is read wherever it lies there. Nothing is read if a field means
// something else.
func TestFlowsOfAnotherVersion(t *testing.T) {
	spec, err := LoadKernel()
	must.OK(t, err)
	own := btf.UnderlyingType(spec.Maps[KernelMapFlows].Value).(*btf.Struct)
	member := func(s *btf.Struct, name string) int {
		return slices.IndexFunc(s.Members, func(m btf.Member) bool { return m.Name == name })
	}
	rename := func(s *btf.Struct, enum, name string) {
		values := s.Members[member(s, enum)].Type.(*btf.Enum).Values
		values[slices.IndexFunc(values, func(v btf.EnumValue) bool { return v.Name == name })].Name = "OTHER"
	}
	want := KernelFlow{Client: KernelAddress{Word: [4]uint32{1, 2, 3, 4}}, ClientPort: 5, MiddlePort: 6, Options: KernelOptionOPTION_IPV6, Started: 7, State: KernelStateOPEN, Seen: KernelSeenKNOWN | KernelSeenCLIENT_RST_DOUBTED}
	want.Way[1].Bytes, want.Way[1].Acked, want.Fin[1] = 8, 9, 10
	entry, err := binary.Append(make([]byte, 8), binary.NativeEndian, &want) // behind another field
	must.OK(t, err)
	for name, c := range map[string]struct {
		change func(*btf.Struct)
		err    string
		lacks  bool
		stays  bool // with that version's programs
	}{
		"moved": {change: func(*btf.Struct) {}},
		"a field is new": {change: func(s *btf.Struct) {
			s.Members = slices.Delete(s.Members, member(s, "started"), member(s, "started")+1)
		}, lacks: true},
		"another type":    {change: func(s *btf.Struct) { s.Members[member(s, "started")].Type = &btf.Int{Size: 4} }, err: "a different started"},
		"another array":   {change: func(s *btf.Struct) { s.Members[member(s, "fin")].Type = &btf.Array{Nelems: 3} }, err: "a different fin"},
		"another meaning": {change: func(s *btf.Struct) { rename(s, "state", "OPEN") }, err: "a different state"},
		"another mark":    {change: func(s *btf.Struct) { rename(s, "seen", "CLIENT_RST_DOUBTED") }, stays: true},
		"one it has not":  {change: func(s *btf.Struct) { rename(s, "seen", "ENDPOINT_RST_DOUBTED") }},
		"no state":        {change: func(s *btf.Struct) { s.Members = slices.Delete(s.Members, member(s, "state"), member(s, "state")+1) }, err: "has no protocol, or no state"},
	} {
		t.Run(name, func(t *testing.T) {
			there := btf.Copy(own).(*btf.Struct)
			c.change(there)
			for i := range there.Members {
				there.Members[i].Offset += 64
			}
			f, err := formOf(own, there)
			if c.err != "" {
				check.Error(t, err, c.err)
				return
			}
			must.OK(t, err)
			if f.knows(entry) == c.stays {
				t.Errorf("the connection stays: %v", !c.stays)
			}
			expected := want
			if c.lacks {
				expected.Started = 0
			}
			var got KernelFlow
			if f.read(entry, &got); got != expected {
				t.Errorf("read\n%+v, want\n%+v", got, expected)
			}
		})
	}
}

// A build of two days before the first release called a mark otherwise. Its connections are read, but for those
// that have this mark.
func TestConnectionsOfAnEarlierBuild(t *testing.T) {
	text, err := os.ReadFile("testdata/flow-e858fdf9.btf")
	must.OK(t, err)
	types, err := btf.LoadSpecFromReader(bytes.NewReader(text))
	must.OK(t, err)
	var there *btf.Struct
	must.OK(t, types.TypeByName("flow", &there))
	spec, err := LoadKernel()
	must.OK(t, err)
	f, err := formOf(spec.Maps[KernelMapFlows].Value, there)
	must.OK(t, err)
	const resetAhead = 65536
	for _, seen := range []KernelSeen{KernelSeenKNOWN | KernelSeenCONFIRMED, KernelSeenKNOWN | resetAhead} {
		k := KernelFlow{ClientPort: 1, VipPort: 2, EndpointPort: 3, MiddlePort: 4, State: KernelStateOPEN, Seen: seen}
		entry, err := binary.Append(nil, binary.NativeEndian, &k)
		must.OK(t, err)
		var got KernelFlow
		if f.read(entry, &got); got != k {
			t.Errorf("read\n%+v, want\n%+v", got, k)
		}
		check.Equal(t, f.knows(entry), seen&resetAhead == 0)
	}
}

// What programs of both versions see while a flow moves is counted once, and the first end is that which came first.
func TestWhatBothVersionsSeeOfAFlow(t *testing.T) {
	was := KernelFlow{Protocol: syscall.IPPROTO_TCP, State: KernelStateOPEN, Seen: KernelSeenKNOWN}
	was.Way[1] = KernelDirection{Bytes: 100, End: 1100, Acked: 7}
	for name, c := range map[string]struct{ there, here, want func(*KernelFlow) }{
		"nothing": {there: func(*KernelFlow) {}, here: func(*KernelFlow) {}, want: func(*KernelFlow) {}},
		"the end there is the first": {
			there: func(k *KernelFlow) {
				k.Seen |= KernelSeenENDPOINT_FIN
				k.FirstEnd = KernelSeenENDPOINT_FIN
				k.Fin[1] = 1101
			},
			here: func(k *KernelFlow) { k.Seen |= KernelSeenCLIENT_FIN; k.FirstEnd = KernelSeenCLIENT_FIN; k.Fin[0] = 8 },
			want: func(k *KernelFlow) {
				k.Seen |= KernelSeenENDPOINT_FIN | KernelSeenCLIENT_FIN
				k.FirstEnd, k.Fin = KernelSeenENDPOINT_FIN, [2]uint32{8, 1101}
			},
		},
		"each saw one acknowledgement": {
			there: func(k *KernelFlow) { k.Seen |= KernelSeenCLIENT_FIN_ACKED; k.Way[1].Last = 5 },
			here:  func(k *KernelFlow) { k.Seen |= KernelSeenENDPOINT_FIN_ACKED },
			want: func(k *KernelFlow) {
				k.Seen |= KernelSeenCLIENT_FIN_ACKED | KernelSeenENDPOINT_FIN_ACKED
				k.State, k.Way[1].Last, k.Closed = KernelStateCLOSED, 5, 5
			},
		},
		"bytes there": {
			there: func(k *KernelFlow) { k.Way[1].Bytes += 10; k.Way[1].End += 10 },
			here:  func(*KernelFlow) {},
			want:  func(k *KernelFlow) { k.Way[1].Bytes, k.Way[1].End = 110, 1110 },
		},
		"bytes there that are counted here by a later acknowledgement": {
			there: func(k *KernelFlow) { k.Way[1].Bytes += 10; k.Way[1].End += 10 },
			here:  func(k *KernelFlow) { k.Way[1].Bytes += 30; k.Way[1].End += 30; k.Way[1].Acked = 8 },
			want:  func(k *KernelFlow) { k.Way[1].Bytes, k.Way[1].End, k.Way[1].Acked = 130, 1130, 8 },
		},
		"bytes here alone": {
			there: func(k *KernelFlow) { k.Way[1].Last = 5 },
			here:  func(k *KernelFlow) { k.Way[0] = KernelDirection{Bytes: 10, End: 3 << 30} },
			want:  func(k *KernelFlow) { k.Way[0], k.Way[1].Last = KernelDirection{Bytes: 10, End: 3 << 30}, 5 },
		},
		"the endpoint's first number there": {
			there: func(k *KernelFlow) { k.Way[0].End = 5000 },
			here:  func(*KernelFlow) {},
			want:  func(k *KernelFlow) { k.Way[0].End = 5000 },
		},
		"the answer there is the first": {
			there: func(k *KernelFlow) { k.Data = 3 },
			here:  func(k *KernelFlow) { k.Data = 4 },
			want:  func(k *KernelFlow) { k.Data = 3 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			now, own, want := was, was, was
			c.there(&now)
			c.here(&own)
			c.want(&want)
			own.merge(&was, &now)
			check.Equal(t, own, want)
		})
	}
}

// Flows of another version are all here before the first one is void there. What that version's programs see
// meanwhile counts, and the one for which there is no room stays, unless it is over.
func TestTakenFlowsAreVoidThere(t *testing.T) {
	root := netns.MountBPF(t)
	open := func(flows int) (*Pins, *Kernel) {
		t.Helper()
		p, err := OpenPins(root, "test", 0, flows)
		must.OK(t, err)
		t.Cleanup(p.Remove)
		k, err := Open(flows, p)
		must.OK(t, err)
		t.Cleanup(k.Close)
		k.Control.Netns = p.Netns
		return p, k
	}
	_, there := open(1000)
	p, _ := open(2000)
	const flows = 3
	for i := 1; i <= flows; i++ {
		there.Flows[i] = KernelFlow{Protocol: syscall.IPPROTO_TCP, State: KernelStateOPEN, Seen: KernelSeenKNOWN, ClientPort: uint16(i), VipPort: 2, EndpointPort: 3, MiddlePort: 4}
	}
	const over = flows + 1
	there.Flows[over] = KernelFlow{Protocol: syscall.IPPROTO_TCP, State: KernelStateCLOSED, Seen: KernelSeenKNOWN | KernelSeenRECORDED, ClientPort: over, VipPort: 2, EndpointPort: 3, MiddlePort: 4}
	var own [flows - 1]KernelFlow
	n := 0
	left, err := p.TakeOthers(func(k *KernelFlow) *KernelFlow {
		check.Equalf(t, there.Flows[over].State, KernelStateFREE, "the one that is over, when flow %d moves", k.ClientPort)
		for i := 1; i <= flows; i++ {
			if f := &there.Flows[i]; f.State != KernelStateOPEN || f.Protocol == 0 {
				t.Errorf("flow %d is void before %d is here", i, k.ClientPort)
			}
		}
		if n == len(own) {
			return nil
		}
		own[n] = *k
		there.Flows[k.ClientPort].Way[0] = KernelDirection{Bytes: 5, End: 5}
		n++
		return &own[n-1]
	})
	must.OK(t, err)
	check.Equal(t, left, 1)
	for i := range own {
		if own[i].Way[0].Bytes != 5 || own[i].State != KernelStateOPEN {
			t.Errorf("%+v", own[i])
		}
		if f := &there.Flows[i+1]; f.State != KernelStateFREE || f.Protocol != 0 {
			t.Errorf("it is there, too: %+v", f)
		}
	}
	if f := &there.Flows[flows]; f.State != KernelStateOPEN || f.Protocol == 0 {
		t.Errorf("the one that stays is void: %+v", f)
	}
	if f := &there.Flows[over]; f.State != KernelStateFREE || f.Protocol != 0 {
		t.Errorf("the one that is over stays: %+v", f)
	}
}
