package conntrack

import "testing"

// A sample takes one connection in n of each loop, however many loops there are: clients
// of UDP, and kernel flows, stay with one loop.
func TestSampledOfEachLoop(t *testing.T) {
	const connections = 200_000
	for _, n := range []uint64{1, 2, 10, 100, 1000} {
		for loops := uint64(1); loops <= 5; loops++ {
			for loop := range loops {
				taken := 0
				for i := range uint64(connections) {
					if (&Record{ID: loop + 1 + i*loops}).Sampled(n) {
						taken++
					}
				}
				if want := connections / int(n); taken < want*7/10 || taken > want*13/10 {
					t.Errorf("1 in %d of loop %d of %d: %d of %d", n, loop+1, loops, taken, connections)
				}
			}
		}
	}
}
