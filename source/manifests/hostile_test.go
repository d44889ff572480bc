package manifests

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestOnlyRegularFilesOfRealFileSystemsAreRead has symlinks to what blocks its
// readers or does something when it is opened. Each is named; the other files are
// served, follow changes, and Run ends with its context.
func TestOnlyRegularFilesOfRealFileSystemsAreRead(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "good.yaml"), svc("good", "10.96.0.1"))
	mkfifo(t, filepath.Join(dir, "fifo.yaml"))
	for name, target := range map[string]string{
		"kmsg.yaml":   "/proc/kmsg", // blocks
		"self.yaml":   "/proc/self/status",
		"sys.yaml":    "/sys/kernel/uevent_seqnum",
		"tty.yaml":    "/dev/tty",
		"null.yaml":   "/dev/null",
		"zero.yaml":   "/dev/zero", // has no end
		"linked.yaml": "fifo.yaml",
		"proc":        "/proc",
		"sys":         "/sys",
	} {
		symlink(t, target, filepath.Join(dir, name))
	}
	ctx, cancel := context.WithCancel(context.Background())
	b := &bench{t: t, news: make(chan struct{}), objects: make(map[string]string)}
	w := New(dir, Options{})
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx, b.apply) }()
	b.has("Service default/good", "10.96.0.1")
	replace(t, filepath.Join(dir, "good.yaml"), svc("good", "10.96.0.2"))
	b.has("Service default/good", "10.96.0.2")
	cancel()
	select {
	case err := <-ended:
		check.OK(t, err)
	case <-time.After(patience):
		t.Fatal("Run does not end with its context")
	}

	told := start(t, dir)
	told.logs("kmsg.yaml: is a file of procfs")
	told.logs("self.yaml: is a file of procfs")
	told.logs("sys.yaml: is a file of sysfs")
	told.logs("null.yaml: is a device")
	told.logs("zero.yaml: is a device")
	told.logs("linked.yaml: is a FIFO")
	told.logs("proc: is a directory of procfs")
	told.logs("sys: is a directory of sysfs")
}

// TestDirectoriesBehindSymlinksAreBounded has a symlink to /, which the directory
// is in itself, and one to a tree of more directories than are followed: these cost
// a bounded number of watches, are named once, and the directory's own files are
// served, however many directories come before them.
func TestDirectoriesBehindSymlinksAreBounded(t *testing.T) {
	dir, large := t.TempDir(), t.TempDir()
	for i := range maxLinkedDirs + 50 {
		d := filepath.Join(large, fmt.Sprintf("%04d", i))
		mkdir(t, d)
		if i == maxLinkedDirs+49 {
			write(t, filepath.Join(d, "last.yaml"), svc("last", "10.96.0.9"))
		}
	}
	symlink(t, "/", filepath.Join(dir, "a-root"))
	symlink(t, large, filepath.Join(dir, "a-large"))
	mkdir(t, filepath.Join(dir, "z"))
	write(t, filepath.Join(dir, "z", "z.yaml"), svc("z", "10.96.0.1"))
	var mu sync.Mutex
	watched := make(map[string]bool)
	b := start(t, dir, with(&fakeNotifier{ev: make(chan fsnotify.Event), err: make(chan error), add: func(dir string) error {
		mu.Lock()
		defer mu.Unlock()
		watched[dir] = true
		return nil
	}}))
	b.has("Service default/z", "10.96.0.1")
	b.logs("a-root: is a symlink to a directory that it is in itself")
	b.logs(fmt.Sprintf("or %d behind symlinks", maxLinkedDirs))
	check.Equalf(t, b.count("this one and those that follow are passed over"), 1, "how often it is told")
	mu.Lock()
	defer mu.Unlock()
	if len(watched) > maxLinkedDirs+10 {
		t.Errorf("%d directories are watched", len(watched))
	}
}

// TestFilesOfDirectoriesThatAreTooManyStay adds a symlink that fills the bound:
// what was known of directories that are passed over now stays in force.
func TestFilesOfDirectoriesThatAreTooManyStay(t *testing.T) {
	dir, first, second := t.TempDir(), t.TempDir(), t.TempDir()
	mkdir(t, filepath.Join(second, "deep"))
	write(t, filepath.Join(second, "deep", "kept.yaml"), svc("kept", "10.96.0.1"))
	symlink(t, second, filepath.Join(dir, "second"))
	symlink(t, first, filepath.Join(dir, "first"))
	b := start(t, dir)
	b.has("Service default/kept", "10.96.0.1")
	for i := range maxLinkedDirs {
		mkdir(t, filepath.Join(first, fmt.Sprint(i)))
	}
	b.logs("this one and those that follow are passed over")
	write(t, filepath.Join(dir, "new.yaml"), svc("new", "10.96.0.2"))
	b.has("Service default/kept", "10.96.0.1", "Service default/new", "10.96.0.2")
}

// TestFilesRaceWithWhatBlocks renames a FIFO, a symlink to /proc/kmsg and a good
// file over each other as fast as it can: nothing blocks, and what is there in the
// end is in force.
func TestFilesRaceWithWhatBlocks(t *testing.T) {
	dir := t.TempDir()
	target, next := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "next")
	write(t, target, svc("a", "10.96.0.1"))
	b := start(t, dir)
	b.has("Service default/a", "10.96.0.1")
	for i := range 500 {
		switch i % 3 {
		case 0:
			mkfifo(t, next)
		case 1:
			symlink(t, "/proc/kmsg", next)
		default:
			write(t, next, svc("a", fmt.Sprintf("10.96.1.%d", i%250+1)))
		}
		rename(t, next, target)
	}
	replace(t, target, svc("a", "10.96.0.2"))
	b.has("Service default/a", "10.96.0.2")
}

// TestCallsThatHangAreGivenUp has calls that never end: each is waited for once and
// not made again until it has ended, and their number is bounded.
func TestCallsThatHangAreGivenUp(t *testing.T) {
	c := calls{limit: time.Millisecond}
	end := make(chan struct{})
	made := make(chan string, 2*maxHanging)
	hang := func(name string) error {
		_, err := within(&c, name, func() int {
			made <- name
			<-end
			return 0
		})
		return err
	}
	for i := range 2 * maxHanging {
		for range 3 {
			if err := hang(fmt.Sprint(i)); err == nil || !strings.Contains(err.Error(), "does not answer") {
				t.Fatalf("call %d: %v", i, err)
			}
		}
	}
	close(end)
	b := time.Now()
	for {
		v, err := within(&calls{}, "other", func() int { return 7 })
		if err != nil || v != 7 {
			t.Fatal(v, err)
		}
		c.mu.Lock()
		left := len(c.hanging)
		c.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Since(b) > patience {
			t.Fatalf("%d calls hang for good", left)
		}
	}
	// All calls have ended, also one that began late.
	check.Equalf(t, len(made), maxHanging, "calls were made")
}

// TestManyFiles reads 100,000 files, or 5,000 of them, and follows a change of one.
func TestManyFiles(t *testing.T) {
	n := 5000
	if os.Getenv("SLUICE_TEST_FULL") == "1" {
		n = 100000
	}
	dir := t.TempDir()
	for i := range n {
		must.OK(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(svc(fmt.Sprintf("s%d", i), fmt.Sprintf("10.%d.%d.%d", 100+i/62500, i/250%250, i%250+1))), 0o644))
	}
	services := 0
	news := make(chan service.Change, 1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _ = New(dir, Options{}).Run(ctx, func(c service.Change) { news <- c }) }()
	next := func() service.Change {
		t.Helper()
		select {
		case c := <-news:
			return c
		case <-time.After(2 * patience):
			t.Fatal("no change")
		}
		return service.Change{}
	}
	begin := time.Now()
	services += len(next().Services)
	check.Equalf(t, services, n, "services of %d files", n)
	t.Logf("%d files read in %v", n, time.Since(begin))
	begin = time.Now()
	replace(t, filepath.Join(dir, "7.yaml"), svc("s7", "10.200.0.1"))
	check.Equalf(t, len(next().Services), 1, "services changed")
	t.Logf("one of them changed in %v", time.Since(begin))
}
