// Package debian runs Debian's programs as nobody, for tests that put them behind Services.
package debian

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// nobody is the user that runs them.
const nobody = 65534

// Find returns the path of a program, also from root's directories.
func Find(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, pattern := range []string{"/usr/sbin/" + name, "/usr/lib/postgresql/*/bin/" + name} {
		if list, _ := filepath.Glob(pattern); len(list) > 0 {
			return list[len(list)-1]
		}
	}
	t.Fatalf("%s is missing: test/programs/install-deps.sh installs it", name)
	return ""
}

// Directory creates a directory that belongs to nobody.
func Directory(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	err := os.Chmod(filepath.Dir(dir), 0o755)
	if os.Getuid() == 0 {
		err = errors.Join(err, os.Chown(dir, nobody, nobody))
	}
	must.OK(t, errors.Join(err, os.Chmod(dir, 0o700)))
	return dir
}

// As has a command run as nobody.
func As(c *netns.Cmd, dir string) *netns.Cmd {
	c.Dir = dir
	c.WaitDelay = wait.Patience // children that outlive it may hold its output
	c.Env = append(os.Environ(), "HOME="+dir, "LC_ALL=C")
	if os.Getuid() == 0 {
		c.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	return c
}
