package manifests

import (
	"encoding/json"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// inheriting has a watcher ask another one, as processes do.
func inheriting(t *testing.T, from *Watcher, change func(*Kept)) func(*Watcher) {
	return func(w *Watcher) {
		w.Inherit(func(dir string, names []string) (list []Kept) {
			must.OK(t, from.Keep(dir, names, func(k *Kept) error {
				var read Kept
				must.OK(t, json.Unmarshal(must.Get(json.Marshal(k))(t), &read))
				change(&read)
				list = append(list, read)
				return nil
			}))
			return list
		})
	}
}

// TestGoodContentIsInherited: a watcher that finds files which it cannot use, or which are empty for a
// moment, has their content of before, as the watcher before it.
func TestGoodContentIsInherited(t *testing.T) {
	dir := t.TempDir()
	symlink(t, t.TempDir(), filepath.Join(dir, "sub"))
	file := func(name string) string { return filepath.Join(dir, name) }
	write(t, file("broken.yaml"), "# a comment\n"+svc("broken", "10.96.0.1")+"---\n"+slc("broken", "broken-1", "10.1.0.1")+"---\n"+eps("old", "10.1.0.2"))
	write(t, file("unread.json"), `{"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "unread"}, "spec": {"clusterIP": "10.96.0.2", "ports": [{"port": 80}]}}]}`)
	write(t, file("sub/kept.yaml"), svc("kept", "10.96.0.3"))
	write(t, file("emptied.yaml"), svc("emptied", "10.96.0.4"))
	write(t, file("good.yaml"), svc("old", "10.96.0.5"))
	write(t, file("removed.yaml"), svc("removed", "10.96.0.6"))
	before := start(t, dir)
	symlink(t, "nowhere", file("tmp"))
	rename(t, file("tmp"), file("unread.json"))
	symlink(t, "/proc/self", file("tmp"))
	rename(t, file("tmp"), file("sub"))
	write(t, file("broken.yaml"), "kind: Service\n  apiVersion: v1\n")
	write(t, file("emptied.yaml"), "")
	remove(t, file("removed.yaml"))
	want := []string{
		"Service default/broken", "10.96.0.1", "EndpointSlice default/broken-1", "10.1.0.1", "Service default/unread", "10.96.0.2",
		"Service default/kept", "10.96.0.3", "Service default/emptied", "10.96.0.4", "Service default/old", "10.96.0.5",
		"EndpointSlice default/old-mirror-ipv4-b5e9c506", "10.1.0.2",
	}
	before.has(want...)
	next := start(t, dir, inheriting(t, before.w, func(*Kept) {}))
	next.has(want...)
	next.logs(`"in_force":"last good content"`)
	check.Equalf(t, next.count(`"in_force":"nothing"`), 0, "files without content")
	check.Equal(t, next.w.Stats().FilesInError, 2)
	check.Equal(t, cmp.Diff(before.w.Where("Service default/broken"), next.w.Where("Service default/broken")), "")

	third := start(t, dir, inheriting(t, next.w, func(*Kept) {}), func(w *Watcher) { w.emptyGrace = 100 * time.Millisecond })
	third.has(append(want[:8:8], want[10:]...)...) // what is emptied goes in the end
	write(t, file("broken.yaml"), svc("broken", "10.96.0.7"))
	third.logs("broken.yaml: is in order again")
}

// TestWhatIsNotInherited: content of another directory, or in another form, is not used.
func TestWhatIsNotInherited(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), svc("a", "10.96.0.1"))
	before := start(t, dir)
	write(t, filepath.Join(dir, "a.yaml"), "kind: Service\n  apiVersion: v1\n")
	for what, change := range map[string]func(*Kept){
		"another format": func(k *Kept) { k.Format++ },
		"spec.clusterIP": func(k *Kept) {
			k.Objects[0].Object = []byte(`{"metadata": {"name": "a"}, "spec": {"clusterIP": "x", "ports": [{"port": 80}]}}`)
		},
		"not valid JSON": func(k *Kept) { k.Objects[0].Object = []byte("{") },
	} {
		next := start(t, dir, inheriting(t, before.w, change))
		next.has()
		next.logs(`cannot be used"`)
		next.logs(what)
	}
	must.OK(t, before.w.Keep(t.TempDir(), []string{"a.yaml"}, func(k *Kept) error {
		t.Errorf("%s of another directory", k.File)
		return nil
	}))
}
