package sys

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// OpenRegular opens a regular file of a real file system for reading. It opens
// nothing else, because opening other files may block or have side effects. The
// error names the kind of file.
func OpenRegular(name string) (*os.File, error) {
	path, err := os.OpenFile(name, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	defer path.Close()
	info, err := path.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("is %s: only regular files are read", Kind(info.Mode()))
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(path.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	if kernel := kernelFileSystem(&st); kernel != "" {
		return nil, fmt.Errorf("is a file of %s: only files of disks, memory and networks are read", kernel)
	}
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(path.Fd())), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	var pe *fs.PathError
	if errors.As(err, &pe) {
		pe.Path = name
	}
	return f, err
}

// ReadKernelFile reads a file of procfs or sysfs. It suits periodic reading: os.ReadFile makes the Go runtime
// watch such a file, which wakes another thread.
func ReadKernelFile(name string) ([]byte, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	b := make([]byte, 0, 512)
	for {
		n, err := unix.Read(fd, b[len(b):cap(b)])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: name, Err: err}
		}
		if n == 0 {
			return b, nil
		}
		if b = b[:len(b)+n]; len(b) == cap(b) {
			b = slices.Grow(b, len(b))
		}
	}
}

// Kind describes the mode of a file that is not regular.
func Kind(m fs.FileMode) string {
	switch {
	case m&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	case m.IsDir():
		return "a directory"
	}
	return "no regular file"
}

// KernelFileSystem returns the name of the file's file system if that is a virtual
// one of the kernel, such as procfs, or else "".
func KernelFileSystem(name string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(name, &st); err != nil {
		return "", &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	return kernelFileSystem(&st), nil
}

// IsBPFFS reports whether a file is in a BPF file system, and whether that can be written to.
func IsBPFFS(name string) (is, writable bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(name, &st); err != nil {
		return false, false, &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	return uint32(st.Type) == unix.BPF_FS_MAGIC, st.Flags&unix.ST_RDONLY == 0, nil
}

func kernelFileSystem(st *unix.Statfs_t) string {
	switch uint32(st.Type) {
	case unix.PROC_SUPER_MAGIC:
		return "procfs"
	case unix.SYSFS_MAGIC:
		return "sysfs"
	case unix.DEBUGFS_MAGIC:
		return "debugfs"
	case unix.TRACEFS_MAGIC:
		return "tracefs"
	case unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC:
		return "cgroupfs"
	case unix.DEVPTS_SUPER_MAGIC:
		return "devpts"
	case unix.BPF_FS_MAGIC, unix.SECURITYFS_MAGIC, unix.SELINUX_MAGIC, unix.SMACK_MAGIC, unix.PSTOREFS_MAGIC, unix.EFIVARFS_MAGIC,
		unix.NSFS_MAGIC, unix.PIPEFS_MAGIC, unix.SOCKFS_MAGIC, unix.BINFMTFS_MAGIC, unix.RDTGROUP_SUPER_MAGIC, unix.XENFS_SUPER_MAGIC,
		unix.ANON_INODE_FS_MAGIC, configFSMagic, mqueueMagic:
		return "a file system of the kernel's"
	}
	return ""
}

// Constants from linux/magic.h and similar headers that package unix lacks.
const (
	configFSMagic = 0x62656570
	mqueueMagic   = 0x19800202
)

// OpenAppend opens a file for appending, creates it if necessary, and never waits.
// It opens a FIFO without a reader for reading too; the FIFO then buffers the data
// until a reader comes.
func OpenAppend(name string, mode fs.FileMode) (*os.File, error) {
	const flags = os.O_APPEND | os.O_CREATE | unix.O_NONBLOCK | unix.O_NOCTTY
	f, err := os.OpenFile(name, flags|os.O_WRONLY, mode)
	if errors.Is(err, unix.ENXIO) {
		return os.OpenFile(name, flags|os.O_RDWR, mode)
	}
	return f, err
}
