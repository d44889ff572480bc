package bpf

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Two CPUs handle a client's acknowledgement and the data behind it at once, as when connect
// returns while the last packet of the handshake is on its way. What the data has reached stays:
// else the flow would believe neither the endpoint's acknowledgement nor the client's RST.
func TestAcknowledgementsTakeNoDataBack(t *testing.T) {
	requireRoot(t)
	k := must.Get(Open(1024, nil))(t)
	t.Cleanup(k.Close)
	client, endpoint := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.1.0.1:80")
	f := &k.Flows[1]
	// The addresses are those that packets have, so that each run finds the same packet.
	*f = KernelFlow{
		State: KernelStateOPEN, Protocol: syscall.IPPROTO_TCP, Seen: KernelSeenCONFIRMED,
		Client: AddressOf(client.Addr()), ClientPort: Wire(client.Port()), MiddlePort: Wire(client.Port()),
		Vip: AddressOf(endpoint.Addr()), VipPort: Wire(endpoint.Port()),
		Endpoint: AddressOf(endpoint.Addr()), EndpointPort: Wire(endpoint.Port()),
		Answered: 1, Data: 1,
	}
	key := TupleOf(syscall.IPPROTO_TCP, client, endpoint)
	if !k.Index.Put(&key, ReferenceTo(1, KernelRoleTO_ENDPOINT)) {
		t.Fatal("no room")
	}
	const payload = 100
	acknowledgement, data := plainPacket(syscall.IPPROTO_TCP, client, endpoint, 0), plainPacket(syscall.IPPROTO_TCP, client, endpoint, payload)
	const sequence = 14 + 20 + 4 // in a frame
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		stayOn(t, 0)
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			binary.BigEndian.PutUint32(acknowledgement[sequence:], atomic.LoadUint32(&f.Way[0].End))
			if _, _, err := k.Ethernet.Ingress.Benchmark(acknowledgement, 50, nil); err != nil {
				done <- err
				return
			}
		}
	}()
	stayOn(t, 1)
	const segments = 50_000
	lost := 0
	for end := uint32(0); end < segments*payload; {
		binary.BigEndian.PutUint32(data[sequence:], end)
		if _, _, err := k.Ethernet.Ingress.Benchmark(data, 1, nil); err != nil {
			t.Error(err)
			break
		}
		end += payload
		if atomic.LoadUint32(&f.Way[0].End) != end {
			lost++
			atomic.StoreUint32(&f.Way[0].End, end)
		}
	}
	close(stop)
	check.OK(t, <-done)
	if lost > 0 {
		t.Errorf("the data of %d of %d segments was taken back", lost, segments)
	}
}

// stayOn keeps the goroutine on one of the CPUs that the test may use, for the rest of its life.
func stayOn(t *testing.T, number int) {
	runtime.LockOSThread()
	var all, one unix.CPUSet
	check.OK(t, unix.SchedGetaffinity(0, &all))
	number %= all.Count()
	for cpu := 0; ; cpu++ {
		if !all.IsSet(cpu) {
			continue
		}
		if number == 0 {
			one.Set(cpu)
			break
		}
		number--
	}
	check.OK(t, unix.SchedSetaffinity(0, &one))
}
