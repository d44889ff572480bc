package procstat

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		line string
		want time.Duration
		ok   bool
	}{
		{"12 (haproxy) S 1 2 3 4 5 6 7 8 9 10 150 50 7 3", 2100 * time.Millisecond, true},
		{"12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 1 2 0 0", 30 * time.Millisecond, true},
		{"12 (short) S 1", 0, false},
		{"", 0, false},
	} {
		got, err := parseStat([]byte(c.line))
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("parseStat(%q) = %v, %v, want %v", c.line, got, err, c.want)
		}
	}
}

func TestParseMachine(t *testing.T) {
	m, err := parseMachine([]byte("cpu  100 10 50 9999 7 1 2 30 0 0\ncpu0 1 2 3\n"))
	want := Machine{Busy: 1630 * time.Millisecond, Steal: 300 * time.Millisecond}
	if err != nil || m != want {
		t.Errorf("got %+v, %v, want %+v", m, err, want)
	}
	if _, err := parseMachine([]byte("intr 1")); err == nil {
		t.Error("a file without a cpu line is no error")
	}
}

func TestParseSmaps(t *testing.T) {
	m := parseSmaps("55-77 ---p 0 00:00 0 [rollup]\nRss:  12 kB\nPss:   7 kB\nPss_Dirty: 3 kB\n")
	if want := (Memory{RSS: 12 << 10, PSS: 7 << 10}); m != want {
		t.Errorf("got %+v, want %+v", m, want)
	}
}

func TestOwnProcess(t *testing.T) {
	self := []int{os.Getpid()}
	if m, err := ReadMemory(self); err != nil || m.RSS == 0 || m.PSS == 0 {
		t.Errorf("memory %+v, %v", m, err)
	}
	if n, err := Descriptors(self); err != nil || n < 3 {
		t.Errorf("%d descriptors, %v", n, err)
	}
	if n, err := Threads(self); err != nil || n < 1 {
		t.Errorf("%d threads, %v", n, err)
	}
	if tree, err := Tree(self[0]); err != nil || !slices.Contains(tree, self[0]) {
		t.Errorf("tree %v, %v", tree, err)
	}
	check.OK(t, must.Err(CPU(self)))
}

func TestParseMap(t *testing.T) {
	id, size := parseMap("pos:\t0\nmap_type:\t1\nmemlock:\t4096\nmap_id:\t17\n")
	if id != "17" || size != 4096 {
		t.Errorf("map %q of %d bytes", id, size)
	}
	if id, _ := parseMap("pos:\t0\nflags:\t02\n"); id != "" {
		t.Errorf("a file is map %q", id)
	}
}
