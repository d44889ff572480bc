package bpf

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
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
	want := KernelFlow{Client: KernelAddress{Word: [4]uint32{1, 2, 3, 4}}, ClientPort: 5, MiddlePort: 6, Options: KernelOptionOPTION_IPV6, Started: 7, State: KernelStateOPEN, Seen: KernelSeenKNOWN}
	want.Way[1].Bytes, want.Way[1].Acked, want.Fin[1] = 8, 9, 10
	entry, err := binary.Append(make([]byte, 8), binary.NativeEndian, &want) // behind another field
	must.OK(t, err)
	for name, c := range map[string]struct {
		change func(*btf.Struct)
		err    string
		lacks  bool
		kept   bool // connections are
	}{
		"moved": {change: func(*btf.Struct) {}},
		"a field is new": {change: func(s *btf.Struct) {
			s.Members = slices.Delete(s.Members, member(s, "started"), member(s, "started")+1)
		}, lacks: true},
		"another type":    {change: func(s *btf.Struct) { s.Members[member(s, "started")].Type = &btf.Int{Size: 4} }, err: "a different started"},
		"another array":   {change: func(s *btf.Struct) { s.Members[member(s, "fin")].Type = &btf.Array{Nelems: 3} }, err: "a different fin"},
		"another meaning": {change: func(s *btf.Struct) { rename(s, "state", "OPEN") }, err: "a different state"},
		"of connections":  {change: func(s *btf.Struct) { rename(s, "seen", "CLIENT_RST_DOUBTED") }, kept: true},
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
			if f.connections == c.kept {
				t.Errorf("connections are read: %v", f.connections)
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
