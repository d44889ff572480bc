package sys

import (
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Nothing but a regular file of a real file system is opened, and the error says what there is.
func TestOpenRegular(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must.OK(t, os.WriteFile(at("file"), []byte("text"), 0o600))
	must.OK(t, os.Symlink("file", at("link")))
	must.OK(t, unix.Mkfifo(at("fifo"), 0o600))
	l := must.Get(net.Listen("unix", at("socket")))(t)
	defer l.Close()
	for name, want := range map[string]string{
		at("file"): "", at("link"): "", at("none"): "open " + at("none") + ": no such file or directory",
		at("fifo"): "is a FIFO: only", at("socket"): "is a socket: only", dir: "is a directory: only",
		os.DevNull: "is a device: only", "/proc/self/status": "is a file of procfs: only",
	} {
		f, err := OpenRegular(name)
		if want != "" {
			check.Errorf(t, err, want, "%s", name)
			continue
		}
		must.OKf(t, err, "%s", name)
		check.Equalf(t, string(must.Get(io.ReadAll(f))(t)), "text", "%s", name)
		f.Close()
	}
	check.Equal(t, Kind(fs.ModeIrregular), "no regular file")
	for name, want := range map[string]string{"/proc": "procfs", dir: ""} {
		check.Equalf(t, must.Get(KernelFileSystem(name))(t), want, "%s", name)
		is, _, err := IsBPFFS(name)
		check.OK(t, err)
		check.Equalf(t, is, false, "%s is a BPF file system", name)
	}
	check.ErrorIsf(t, must.Err(KernelFileSystem(at("none"))), fs.ErrNotExist, "a file that does not exist")
	_, _, err := IsBPFFS(at("none"))
	check.ErrorIsf(t, err, fs.ErrNotExist, "a file that does not exist")
}

// A file is read whole, whatever its length, and errors name it.
func TestReadKernelFile(t *testing.T) {
	check.Equal(t, string(must.Get(ReadKernelFile("/proc/version"))(t)), string(must.Get(os.ReadFile("/proc/version"))(t)))
	name := filepath.Join(t.TempDir(), "file")
	for _, length := range []int{0, 1, 511, 512, 513, 5000} {
		text := strings.Repeat("x", length)
		must.OK(t, os.WriteFile(name, []byte(text), 0o600))
		check.Equalf(t, string(must.Get(ReadKernelFile(name))(t)), text, "%d bytes", length)
	}
	check.Errorf(t, must.Err(ReadKernelFile("/proc/none")), "open /proc/none: no such file or directory", "a file that does not exist")
	check.Errorf(t, must.Err(ReadKernelFile("/proc")), "read /proc: is a directory", "a directory")
	check.ErrorIsf(t, must.Err(ReadKernelFile("/proc/none")), fs.ErrNotExist, "a file that does not exist")
}

// What is appended to a FIFO before somebody reads it is there for the reader.
func TestOpenAppend(t *testing.T) {
	dir := t.TempDir()
	must.OK(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	for name, want := range map[string]string{"file": "onetwo", "fifo": "onetwo"} {
		name = filepath.Join(dir, name)
		for _, text := range []string{"one", "two"} {
			f := must.Get(OpenAppend(name, 0o600))(t)
			defer f.Close()
			must.OKf(t, must.Err(f.WriteString(text)), "%s", name)
		}
		r := must.Get(os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0))(t)
		defer r.Close()
		p := make([]byte, 16)
		n, err := r.Read(p)
		must.OKf(t, err, "%s", name)
		check.Equalf(t, string(p[:n]), want, "%s", name)
	}
}

// A file in memory is read whole or not at all.
func TestMemoryFile(t *testing.T) {
	fd := must.Get(WriteMemoryFile([]byte("text")))(t)
	defer Close(fd)
	for n, want := range map[int]string{4: "text", 3: "", 5: "", 0: "", -1: ""} {
		check.Equalf(t, string(ReadMemoryFile(fd, n)), want, "%d bytes", n)
	}
	check.Equalf(t, must.Get(unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0))(t), unix.FD_CLOEXEC, "flags")
}
