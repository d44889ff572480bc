package flow

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// put enters a tuple, as put in bpf/index.h does. It reports false if there is no room. (The
// models of packets have BPF find what this puts, and put what is found here.)
func (x *index) put(t *kernelTuple, r reference) bool {
	hash := x.hash(t)
	for n := range places {
		b := x.place(hash, n)
		if i := b.empty(); i >= 0 {
			b.Slot[i] = hash>>32<<32 | uint64(r)
			if n > 0 {
				x.place(hash, 0).Moved++
			}
			return true
		}
	}
	return false
}

func (b *kernelBucket) empty() int {
	for i, slot := range b.Slot {
		if slot == 0 {
			return i
		}
	}
	return -1
}

// TestIndexModel enters and erases all tuples that an index is made for. Each has room, is found
// until it is erased, and nothing else is.
func TestIndexModel(t *testing.T) {
	const flows = 256
	x := index{buckets: make([]kernelBucket, flows), flows: make([]kernelFlow, flows+1), seed: rand.Uint64()}
	roles := []kernelRole{kernelRoleTO_ENDPOINT, kernelRoleMASQUERADE, kernelRoleUNMASQUERADE, kernelRoleTO_CLIENT}
	has := make(map[reference]bool)
	moved, refused := 0, 0
	addr := func(net byte) kernelAddress {
		return addressOf(netip.AddrFrom4([4]byte{10, net, byte(rand.IntN(256)), byte(rand.IntN(256))}))
	}
	for i := uint32(1); i <= flows; i++ {
		x.flows[i] = kernelFlow{Protocol: syscall.IPPROTO_TCP, Client: addr(1), Vip: addr(2), Endpoint: addr(3), Node: addr(4),
			ClientPort: uint16(i), MiddlePort: uint16(i), VipPort: 1, EndpointPort: 2, NodePort: uint16(i)}
	}
	check := func() {
		t.Helper()
		moved = 0
		for i := range x.buckets {
			moved += int(x.buckets[i].Moved)
		}
		for i := uint32(1); i <= flows; i++ {
			for _, role := range roles {
				r := referenceTo(i, role)
				tuple := x.tuple(r)
				if found := x.find(&tuple); has[r] != (found == r) || !has[r] && found != 0 {
					t.Fatalf("flow %d, role %d: found %#x, entered %v", i, role, found, has[r])
				}
			}
		}
	}
	enter := func(i uint32) {
		for _, role := range roles {
			r := referenceTo(i, role)
			tuple := x.tuple(r)
			if has[r] {
				continue
			}
			if has[r] = x.put(&tuple, r); !has[r] {
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
		for i := uint32(1); i <= flows; i++ {
			if rand.IntN(2) == 0 {
				for _, role := range roles {
					x.erase(i, x.tuple(referenceTo(i, role)))
					has[referenceTo(i, role)] = false
				}
				continue
			}
			x.erase(i%flows+1, x.tuple(referenceTo(i, kernelRoleTO_ENDPOINT))) // not that one's
		}
		check()
	}
	if refused > 0 {
		t.Errorf("no room for %d tuples of at most %d", refused, 4*flows)
	}
	x.prune(func(reference) bool { return true })
	clear(has)
	if check(); moved != 0 {
		t.Errorf("%d tuples count as moved, of none", moved)
	}
}

// A flow that finds no room for one of its tuples leaves none of the others.
func TestNoRoomInTheIndex(t *testing.T) {
	for _, hidden := range []bool{false, true} {
		t.Run(map[bool]string{false: "client's address", true: "hidden"}[hidden], func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			n := newNode(t, lab, func(o *Options) { o.ask = true })
			n.config.MasqueradeAll = hidden
			n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{time.Second}, After: time.Second, Total: time.Second}
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			client := &net.TCPAddr{IP: lab.Client.IPv4.AsSlice(), Port: 45678}
			key := tupleOf(syscall.IPPROTO_TCP, netip.AddrPortFrom(lab.Client.IPv4, 45678), netip.MustParseAddrPort(vip4+":80"))
			x := &n.server.kernel.index
			const slots = len(kernelBucket{}.Slot)
			fill := func(slot uint64) {
				for n := range places {
					b := x.place(x.hash(&key), n)
					for i := range b.Slot {
						b.Slot[i] = slot
					}
				}
			}
			const nobody = 1<<63 | MostFlows
			fill(nobody)
			dialled := make(chan struct{})
			go func() {
				defer close(dialled)
				if c, err := lab.Client.Dialer(&net.Dialer{LocalAddr: client}, "tcp", vip4+":80"); err == nil {
					t.Error("it is served")
					_ = c.Close()
				}
			}()
			wait.True(t, "a packet that cannot be put back", func() bool { return n.server.Stats().Lost > 0 })
			if got := n.entries(); got != places*slots {
				t.Errorf("%d tuples are entered, besides those of nobody", got-places*slots)
			}
			<-dialled
			fill(0)
			if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || said != "b1:8080" {
				t.Errorf("with room again: %q, %v", said, err)
			}
		})
	}
}
