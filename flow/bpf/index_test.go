package bpf

import (
	"math/rand/v2"
	"net/netip"
	"syscall"
	"testing"
)

// TestIndexModel enters and erases all tuples that an index is made for. Each has room, is found
// until it is erased, and nothing else is.
func TestIndexModel(t *testing.T) {
	const flows = 256
	x := Index{Buckets: make([]KernelBucket, flows), flows: make([]KernelFlow, flows+1), seed: rand.Uint64()}
	roles := []KernelRole{KernelRoleTO_ENDPOINT, KernelRoleMASQUERADE, KernelRoleUNMASQUERADE, KernelRoleTO_CLIENT}
	has := make(map[Reference]bool)
	moved, refused := 0, 0
	addr := func(net byte) KernelAddress {
		return AddressOf(netip.AddrFrom4([4]byte{10, net, byte(rand.IntN(256)), byte(rand.IntN(256))}))
	}
	for i := uint32(1); i <= flows; i++ {
		x.flows[i] = KernelFlow{Protocol: syscall.IPPROTO_TCP, Options: KernelOptionOPTION_MASQUERADE, Client: addr(1), Vip: addr(2), Endpoint: addr(3), Node: addr(4),
			ClientPort: uint16(i), MiddlePort: uint16(i), VipPort: 1, EndpointPort: 2, NodePort: uint16(i)}
	}
	check := func() {
		t.Helper()
		moved = 0
		for i := range x.Buckets {
			moved += int(x.Buckets[i].Moved)
		}
		for i := uint32(1); i <= flows; i++ {
			for _, role := range roles {
				r := ReferenceTo(i, role)
				tuple := x.Tuple(r)
				if found := x.Find(&tuple); has[r] != (found == r) || !has[r] && found != 0 {
					t.Fatalf("flow %d, role %d: found %#x, entered %v", i, role, found, has[r])
				}
			}
		}
	}
	enter := func(i uint32) {
		for _, role := range roles {
			r := ReferenceTo(i, role)
			tuple := x.Tuple(r)
			if has[r] {
				continue
			}
			if has[r] = x.Put(&tuple, r); !has[r] {
				refused++
			}
		}
	}
	for range 4 {
		for i := uint32(1); i <= flows; i++ {
			enter(i)
		}
		check()
		if moved == 0 {
			t.Error("no home has been full")
		}
		var together []uint32
		for i := uint32(1); i <= flows; i++ {
			how := rand.IntN(3)
			if how == 0 {
				x.Erase(i%flows+1, x.Tuple(ReferenceTo(i, KernelRoleTO_ENDPOINT))) // not that one's
				continue
			}
			if how == 1 {
				together = append(together, i)
			}
			for _, role := range roles {
				if how == 2 {
					x.Erase(i, x.Tuple(ReferenceTo(i, role)))
				}
				has[ReferenceTo(i, role)] = false
			}
		}
		x.EraseAll(together...)
		check()
	}
	if refused > 0 {
		t.Errorf("no room for %d tuples of at most %d", refused, 4*flows)
	}
	x.Prune(func(Reference) bool { return true })
	clear(has)
	if check(); moved != 0 {
		t.Errorf("%d tuples count as moved, of none", moved)
	}
}
