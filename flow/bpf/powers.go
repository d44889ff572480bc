package bpf

import (
	"hash/crc32"

	"github.com/cilium/ebpf"
)

// powersSize is how many powers the programs need: POWERS of layout.h.
const powersSize = 1 << 14

// powers returns the map's content: x^(32 n), modulo the polynomial, whose lowest bit is
// the highest power; then x^(32 n + 24), the first bit of a word's first byte.
func powers() []ebpf.MapKV {
	of := make([]uint32, 2*powersSize)
	power := uint32(1) << 31
	for i := range powersSize {
		of[i] = power
		for bit := range 32 {
			if bit == 24 {
				of[powersSize+i] = power
			}
			power = power>>1 ^ crc32.Castagnoli&-(power&1)
		}
	}
	return []ebpf.MapKV{{Key: uint32(0), Value: of}}
}
