// User Mode Linux before 6.13 has 2696 bytes for the extended registers of a
// process: enough up to the protection keys, not for AMX tiles. Reading them
// gives what fits. Writing back fewer bytes than the processor has is refused
// by newer host kernels, and the guest dies. So what is written is completed by
// what is there, with the components that the guest does not know set to their
// initial state.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

#ifndef NT_X86_XSTATE
#define NT_X86_XSTATE 0x202
#endif

enum {
	PRESENT_MASK_AT = 512,  // of the XSAVE header: which components follow
	KNOWN = 0x3ff,          // x87 to protection keys
};

typedef long (*ptrace_fn)(int, long, void *, void *);

long ptrace(enum __ptrace_request request, ...)
{
	static ptrace_fn next;
	static char whole[1 << 16] __attribute__((aligned(64)));
	va_list args;

	va_start(args, request);
	long pid = va_arg(args, int);
	void *addr = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);
	if (!next)
		next = (ptrace_fn)dlsym(RTLD_NEXT, "ptrace");
	if ((int)request != PTRACE_SETREGSET || (long)addr != NT_X86_XSTATE)
		return next(request, pid, addr, data);

	struct iovec *given = data;
	struct iovec all = { whole, sizeof whole };
	unsigned long present;

	if (next(PTRACE_GETREGSET, pid, addr, &all) < 0)
		return -1;
	if (all.iov_len <= given->iov_len)
		return next(request, pid, addr, data);
	memcpy(whole, given->iov_base, given->iov_len);
	memcpy(&present, whole + PRESENT_MASK_AT, sizeof present);
	present &= KNOWN;
	memcpy(whole + PRESENT_MASK_AT, &present, sizeof present);
	return next(PTRACE_SETREGSET, pid, addr, &all);
}
