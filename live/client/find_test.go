package client

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/socket"
)

// proxyAt answers as a proxy of a network namespace.
func proxyAt(t *testing.T, path string, namespace uint64) {
	t.Helper()
	serve(t, path, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Version{API: "v1", Node: "node-a", Namespace: namespace})
	})
}

// A proxy is found by the network namespace that it serves, and not by being the only
// one.
func TestFindHere(t *testing.T) {
	const own, other = 7, 8
	for name, tt := range map[string]struct {
		usual, others []uint64 // namespaces of the proxies that answer
		want          string   // the socket, or a part of the error
	}{
		"the usual one":           {[]uint64{own}, []uint64{own, other}, "usual-0.sock"},
		"another instance":        {nil, []uint64{other, own}, "others-1.sock"},
		"usual file, not its own": {[]uint64{other}, []uint64{own}, "others-0.sock"},
		"only one, elsewhere":     {nil, []uint64{other}, "there are others to name with --admin-socket:\n  "},
		"several instances":       {nil, []uint64{own, own}, "several proxies run in this network namespace"},
		"none":                    {nil, nil, "neither"},
		"usual file, elsewhere":   {[]uint64{other}, nil, "(node node-a"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			at := func(kind string, i int) string {
				return filepath.Join(dir, kind+"-"+string(rune('0'+i))+".sock")
			}
			for i, namespace := range tt.usual {
				proxyAt(t, at("usual", i), namespace)
			}
			var others []string
			for i, namespace := range tt.others {
				proxyAt(t, at("others", i), namespace)
				others = append(others, at("others", i))
			}
			c, err := findHere(context.Background(), []string{at("usual", 0), at("usual", 1)}, others, own)
			switch {
			case err != nil && !strings.Contains(err.Error(), tt.want):
				t.Errorf("%v, want %s", err, tt.want)
			case err == nil && filepath.Base(c.Name) != tt.want:
				t.Errorf("%s, want %s", c.Name, tt.want)
			}
		})
	}
}

// No name and "auto" mean the same.
func TestFindAuto(t *testing.T) {
	texts := map[string]string{}
	for _, name := range []string{"", socket.Auto, "nowhere.sock"} {
		if _, err := Find(t.Context(), name); err != nil {
			texts[name], _, _ = strings.Cut(err.Error(), " namespace") // other proxies, which come and go, are named behind
		}
	}
	if texts[""] != texts[socket.Auto] || texts[""] == texts["nowhere.sock"] {
		t.Errorf("%q", texts)
	}
}
