package demo

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDoorDirs(t *testing.T) {
	for _, c := range []struct {
		runtime, want string
	}{
		{"/run/user/7", "/run/user/7/sluice-demo /tmp/sluice-demo-7"},
		{"", "/tmp/sluice-demo-7"},
		{"relative", "/tmp/sluice-demo-7"},
	} {
		if got := strings.Join(doorDirs(c.runtime, "/tmp", 7), " "); got != c.want {
			t.Errorf("%q: %s, want %s", c.runtime, got, c.want)
		}
	}
}

func TestDoor(t *testing.T) {
	uid := os.Geteuid()
	dir := filepath.Join(t.TempDir(), "door")
	dirs := []string{filepath.Join(t.TempDir(), "no", "such"), dir}
	if _, err := knock(dirs, uid); !errors.Is(err, errNobody) {
		t.Fatalf("knock with nobody there: %v", err)
	}
	l, err := openDoor(dirs, uid)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: os.ModeDir | 0o700, filepath.Join(dir, doorName): os.ModeSocket | 0o600} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
	c, err := knock(dirs, uid)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := openDoor(dirs, uid); !errors.Is(err, errBusy) {
		t.Errorf("a second door: %v", err)
	}

	// A demo that was killed leaves its socket.
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := knock(dirs, uid); !errors.Is(err, errNobody) {
		t.Errorf("knock at a dead socket: %v", err)
	}
	if l, err = openDoor(dirs, uid); err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	closeDoor(l)
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory is left: %v", err)
	}
}

func TestDoorIsPrivate(t *testing.T) {
	uid := os.Geteuid()
	dir := filepath.Join(t.TempDir(), "door")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		mode os.FileMode
		uid  int
		want string
	}{{0o750, uid, "open to others"}, {0o700, uid + 1, "somebody else"}} {
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := openDoor([]string{dir}, c.uid); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("open: %v, want %q", err, c.want)
		}
		if _, err := knock([]string{dir}, c.uid); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("knock: %v, want %q", err, c.want)
		}
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if _, err := openDoor([]string{link}, uid); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("a symbolic link: %v", err)
	}
}
