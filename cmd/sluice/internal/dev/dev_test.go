package dev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	must.OK(t, os.MkdirAll(filepath.Dir(path), 0o700))
	must.OK(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// TestSources gathers files of any folders, also two of one name.
func TestSources(t *testing.T) {
	dir := t.TempDir()
	one, two := write(t, dir+"/a/web.yaml", "1"), write(t, dir+"/b/web.yaml", "2")
	check.Equalf(t, must.Get(Sources(dir+"/links", []string{dir + "/a"}))(t), dir+"/a", "one directory")
	got := must.Get(Sources(dir+"/links", []string{one, two, dir + "/a"}))(t)
	for name, want := range map[string]string{"web.yaml": "1", "2-web.yaml": "2", "a/web.yaml": "1"} {
		if text, err := os.ReadFile(filepath.Join(got, name)); err != nil || string(text) != want {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	for _, arg := range []string{dir + "/none.yaml", write(t, dir+"/web.yaml.txt", "")} {
		check.Errorf(t, must.Err(Sources(dir+"/more", []string{arg})), arg, "%s", arg)
	}
}

// TestResolvers reads the name servers, and passes over what is none.
func TestResolvers(t *testing.T) {
	path := write(t, t.TempDir()+"/resolv.conf", "# nameserver 10.0.0.1\nnameserver 192.0.2.53\nsearch a\nnameserver fe80::1%eth0\nnameserver 2001:db8::53\nnameserver\n")
	check.Equal(t, fmt.Sprint(Resolvers(path)), "[192.0.2.53:53 [2001:db8::53]:53]")
	if got := Resolvers(path + "none"); got != nil {
		t.Error(got)
	}
}

// TestHostsFile keeps what others wrote, byte by byte.
func TestHostsFile(t *testing.T) {
	for _, own := range []string{"", "127.0.0.1 localhost\n", "a\n\nb\n"} {
		h := HostsFile{Path: write(t, t.TempDir()+"/hosts", own)}
		for _, lines := range [][]string{{"10.0.0.1 web"}, {"10.0.0.1 web", "10.0.0.2 api"}} {
			must.OK(t, h.Write(lines))
			want := own + blockBegin + "\n" + strings.Join(lines, "\n") + "\n" + blockEnd + "\n"
			if text, _ := os.ReadFile(h.Path); string(text) != want {
				t.Errorf("%q, want %q", text, want)
			}
		}
		must.OK(t, h.Remove())
		if text, _ := os.ReadFile(h.Path); string(text) != own {
			t.Errorf("left %q, want %q", text, own)
		}
	}
}
