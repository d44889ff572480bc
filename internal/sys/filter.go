package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FilterOp is one instruction of a classic BPF program in the kernel's layout
// (struct sock_filter).
type FilterOp struct {
	Code   uint16
	Jt, Jf uint8
	K      uint32
}

// The parts of FilterOp.Code that package sockfilter needs.
const (
	FilterLoadWord = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS // A = 4 bytes at K, in host order
	FilterLoadHalf = unix.BPF_LD | unix.BPF_H | unix.BPF_ABS // A = 2 bytes at K
	FilterLoadByte = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS // A = the byte at K
	FilterJump     = unix.BPF_JMP | unix.BPF_JA              // skip K instructions
	FilterIfEqual  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	FilterIfAbove  = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	FilterIfLeast  = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	FilterAnd      = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	FilterReturn   = unix.BPF_RET | unix.BPF_K // keep K bytes of the packet; 0 drops it
)

// MaxFilterOps is the maximum length of a program.
const MaxFilterOps = unix.BPF_MAXINSNS

// FilterNetwork makes an offset that it is added to relative to the IP header, not to
// the TCP or UDP header.
const FilterNetwork = 0xfff00000 // SKF_NET_OFF

// AttachFilter attaches a program that decides which packets a socket receives, and
// atomically replaces the previous one. On a listening TCP socket, it applies to
// the first packet of a handshake: a dropped client gets no answer (F5). Accepted
// sockets inherit the program. ENOMEM means that net.core.optmem_max is too small
// for both programs.
func AttachFilter(fd int, program []FilterOp) Errno {
	if len(program) == 0 || len(program) > MaxFilterOps {
		return EINVAL
	}
	fprog := struct {
		length uint16
		ops    *FilterOp
	}{uint16(len(program)), &program[0]}
	_, _, e := syscall.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, uintptr(unsafe.Pointer(&fprog)), unsafe.Sizeof(fprog), 0)
	return e
}

// DetachFilter removes a socket's program. ENOENT means that it had none.
func DetachFilter(fd int) Errno {
	return setInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
}
