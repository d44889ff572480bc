package tracking

import (
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// all sets everything to something else than the kernel's defaults.
var all = Settings{Established: 24 * time.Hour, CloseWait: time.Hour, BeLiberal: true, UDP: 7 * time.Second, UDPStream: 77 * time.Second}

var allSet = map[string]string{
	"nf_conntrack_tcp_timeout_established": "86400", "nf_conntrack_tcp_timeout_close_wait": "3600", "nf_conntrack_tcp_be_liberal": "1",
	"nf_conntrack_udp_timeout": "7", "nf_conntrack_udp_timeout_stream": "77",
}

// TestKernelTakesTheSettings makes them in a network namespace, by files, and where
// these cannot be written, as far as possible by netlink.
func TestKernelTakesTheSettings(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		node := netns.NewLab(t, 1).Node
		var before, after = map[string]string{}, map[string]string{}
		err := sys.InNetNS(node.FD(), func() error {
			k := Host()
			read := func(values map[string]string) {
				for name := range allSet {
					values[name], _ = k.Read(sysctls + "/" + name)
				}
			}
			if read(before); before["nf_conntrack_udp_timeout"] == "" {
				t.Skip("SKIP-NEEDS: connection tracking")
			}
			if readOnly {
				k.Write = func(path, _ string) error { return &fs.PathError{Op: "open", Path: path, Err: syscall.EROFS} }
			}
			set, problems := all.Apply(k)
			read(after)
			want := maps.Clone(allSet)
			if readOnly {
				want["nf_conntrack_tcp_be_liberal"] = before["nf_conntrack_tcp_be_liberal"]
				if len(problems) != 1 || !strings.Contains(problems[0].Error(), "net.netfilter.nf_conntrack_tcp_be_liberal stays 0, 1 is wanted: read-only file system") {
					t.Errorf("problems %v", problems)
				}
			} else if len(problems) > 0 {
				t.Errorf("problems %v", problems)
			}
			if !maps.Equal(after, want) {
				t.Errorf("read-only %v: the kernel has %v, want %v", readOnly, after, want)
			}
			if again, _ := all.Apply(k); len(again) > 0 || len(set) < 4 {
				t.Errorf("set %q, and again %q", set, again)
			}
			return nil
		})
		must.OK(t, err)
	}
}

// TestMax: a maximum that cannot be set is a problem only if there is less room than
// kube-proxy would make.
func TestMax(t *testing.T) {
	for _, test := range []struct {
		now, buckets string
		max          int
		denied       bool
		want         map[string]string // written
		problems     int
	}{
		{"65536", "16384", 131072, false, map[string]string{sysctls + "/nf_conntrack_max": "131072", hashSize: "32768"}, 0},
		{"262144", "65536", 131072, false, map[string]string{sysctls + "/nf_conntrack_max": "131072"}, 0},
		{"262144", "65536", 131072, true, nil, 0},
		{"65536", "16384", 131072, true, nil, 2},
		{"131072", "32768", 131072, true, nil, 0},
		{"131072", "32768", 0, true, nil, 0},
	} {
		written := map[string]string{}
		k := Kernel{
			Read: func(path string) (string, error) {
				return map[string]string{sysctls + "/nf_conntrack_max": test.now, hashSize: test.buckets}[path], nil
			},
			Write: func(path, value string) error {
				if test.denied {
					return syscall.EROFS
				}
				written[path] = value
				return nil
			},
		}
		_, problems := Settings{Max: test.max}.Apply(k)
		if !maps.Equal(written, test.want) || len(problems) != test.problems {
			t.Errorf("%+v: wrote %v, problems %v", test, written, problems)
		}
	}
	// By default a greater maximum stays.
	for now, want := range map[string]string{"262144": "", "65536": "131072"} {
		wrote := ""
		k := Kernel{
			Read: func(path string) (string, error) {
				return map[string]string{sysctls + "/nf_conntrack_max": now}[path], nil
			},
			Write: func(path, value string) error {
				if path == sysctls+"/nf_conntrack_max" {
					wrote = value
				}
				return nil
			},
		}
		if _, problems := (Settings{Max: 131072, Raise: true}).Apply(k); wrote != want || len(problems) > 0 {
			t.Errorf("%s by default: wrote %q, want %q; problems %v", now, wrote, want, problems)
		}
	}
	check.Equalf(t, MaxFor(0, 100), 0, "without a maximum for each CPU")
	check.Equalf(t, MaxFor(1, 1000_000), 1000_000, "the least")
	check.Equalf(t, MaxFor(1<<20, 1), maxLimit, "the limit")
	// Without connection tracking nothing is set.
	none := Kernel{Read: func(string) (string, error) { return "", fs.ErrNotExist }}
	if set, problems := all.Apply(none); len(set) > 0 || len(problems) != 1 || !slices.ContainsFunc(problems, func(err error) bool { return strings.Contains(err.Error(), "not loaded") }) {
		t.Errorf("without connection tracking: %q, %v", set, problems)
	}
}
