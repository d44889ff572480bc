package sys

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MapArray maps a BPF array of n elements of type T (BPF_F_MMAPABLE) into memory, for
// reading and writing. T has no pointers, and the size of the array's values, which is a
// multiple of 8. Other programs change the memory at any time. The caller releases it with
// UnmapArray.
func MapArray[T any](fd, n int) ([]T, error) {
	size := int(unsafe.Sizeof(*new(T))) * n
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap %d bytes of a BPF array: %w", size, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}

// UnmapArray releases the memory of MapArray.
func UnmapArray[T any](a []T) {
	if len(a) == 0 {
		return
	}
	size := int(unsafe.Sizeof(a[0])) * len(a)
	_ = unix.MunmapPtr(unsafe.Pointer(&a[0]), uintptr(size))
}
