package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// IsGuest tells whether this process is a guest's first process.
func IsGuest() bool { return os.Getpid() == 1 && os.Getenv(jobEnv) != "" }

// Guest is the guest's first process: it prepares the guest, runs the command,
// writes its exit status, and powers the guest off. It does not return.
func Guest() {
	status, err := guest()
	text := strconv.Itoa(status)
	if err != nil {
		text = err.Error()
	}
	_ = os.WriteFile(filepath.Join(jobDir, statusFile), []byte(text), 0o644)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// jobDir is the guest's mount point of the job's directory, which it reads and
// writes.
const jobDir = "/run/job"

func guest() (status int, err error) {
	// Mount /run first: later mounts may hide the job's directory.
	if err := mountAll([]mount{{"tmpfs", "/run", "mode=1777"}}); err != nil {
		return 0, err
	}
	if err := mountHost(os.Getenv(jobEnv), jobDir, 0); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(filepath.Join(jobDir, configFile))
	if err != nil {
		return 0, err
	}
	var c Config
	if err := json.Unmarshal(text, &c); err != nil {
		return 0, err
	}
	err = mountAll([]mount{
		{"proc", "/proc", ""}, {"sysfs", "/sys", ""}, {"tmpfs", "/tmp", "mode=1777"}, {"tmpfs", "/root", ""},
		{"devtmpfs", "/dev", ""}, {"tmpfs", "/dev/shm", "mode=1777"}, {"devpts", "/dev/pts", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
	})
	if err != nil {
		return 0, err
	}
	for _, dir := range c.Visible {
		if _, err := os.Stat(dir); err == nil {
			continue // part of the root
		}
		if err := mountHost(dir, dir, unix.MS_RDONLY); err != nil {
			return 0, err
		}
	}
	for _, dir := range c.Writable {
		if err := mountHost(dir, dir, 0); err != nil {
			return 0, err
		}
	}
	if err := LoadModules(c.Modules...); err != nil {
		return 0, err
	}
	if !c.Unlocked {
		if err := os.WriteFile("/proc/sys/kernel/modules_disabled", []byte("1"), 0); err != nil {
			return 0, err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return 0, fmt.Errorf("lo: %w", err)
	}
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 65536, Max: 65536})
	return runCommand(&c)
}

func runCommand(c *Config) (status int, err error) {
	console, err := os.OpenFile("/dev/console", os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	// Newlines must not be translated.
	if t, err := unix.IoctlGetTermios(int(console.Fd()), unix.TCGETS); err == nil {
		t.Oflag &^= unix.OPOST
		_ = unix.IoctlSetTermios(int(console.Fd()), unix.TCSETS, t)
	}
	cmd := exec.Command(c.Command[0], c.Command[1:]...)
	cmd.Dir = c.Dir
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=/tmp"}, c.Env...)
	cmd.Stdout, cmd.Stderr = console, console
	err = cmd.Run()
	_ = unix.IoctlSetInt(int(console.Fd()), unix.TCSBRK, 1) // wait until everything is written
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if exit.ExitCode() < 0 {
			return 0, fmt.Errorf("%s: %w", c.Command[0], err)
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

type mount struct{ kind, target, options string }

func mountAll(list []mount) error {
	for _, m := range list {
		if strings.Count(m.target, "/") > 1 {
			_ = os.MkdirAll(m.target, 0o755)
		}
		err := unix.Mount(m.kind, m.target, m.kind, 0, m.options)
		if err != nil && !errors.Is(err, unix.EBUSY) && m.kind != "cgroup2" {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.target, err)
		}
	}
	return nil
}

// mountHost mounts a directory of the host.
func mountHost(dir, target string, flags uintptr) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("none", target, "hostfs", flags, dir); err != nil {
		return fmt.Errorf("mount the host's %s: %w", dir, err)
	}
	return nil
}

// LoadModules loads modules by name into this kernel, a guest's, each after its
// dependencies.
func LoadModules(names ...string) error {
	if len(names) == 0 {
		return nil
	}
	var uname unix.Utsname
	if err := unix.Uname(&uname); err != nil {
		return err
	}
	root := filepath.Join(modulesRoot, unix.ByteSliceToString(uname.Release[:]))
	text, err := os.ReadFile(filepath.Join(root, "modules.dep"))
	if err != nil {
		return err
	}
	needs := map[string][]string{} // "kernel/net/a.ko: kernel/net/b.ko kernel/net/c.ko": c first
	for line := range strings.Lines(string(text)) {
		path, others, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[moduleName(path)] = append([]string{path}, strings.Fields(others)...)
	}
	for _, name := range names {
		paths, known := needs[moduleName(name)]
		if !known {
			return fmt.Errorf("module %s: this kernel has none", name)
		}
		for i := len(paths) - 1; i >= 0; i-- {
			if err := loadModule(filepath.Join(root, paths[i])); err != nil {
				return fmt.Errorf("module %s: %s: %w", name, paths[i], err)
			}
		}
	}
	return nil
}

func moduleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}
