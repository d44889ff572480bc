package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"time"
)

// embedded is the page: plain HTML, CSS and JavaScript modules, as the browser gets
// them.
//
//go:embed assets
var embedded embed.FS

// asset is a file of the page.
type asset struct {
	kind string // Content-Type
	tag  string // ETag
	data []byte
}

// assets are the files by their paths in URLs.
type assets map[string]asset

// kinds are the types of files. The system's table of types would not be the same
// everywhere.
var kinds = map[string]string{
	".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
}

func newAssets() (assets, error) {
	all := make(assets)
	err := fs.WalkDir(embedded, "assets", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		kind := kinds[path.Ext(name)]
		if kind == "" {
			return fmt.Errorf("%s has no known type", name)
		}
		data, err := embedded.ReadFile(name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		all[strings.TrimPrefix(name, "assets")] = asset{
			kind: mime.FormatMediaType(kind, map[string]string{"charset": "utf-8"}),
			tag:  `"` + hex.EncodeToString(sum[:12]) + `"`,
			data: data,
		}
		return nil
	})
	all["/"] = all["/index.html"]
	return all, err
}

// ServeHTTP implements http.Handler.
func (a assets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	file, ok := a[r.URL.Path]
	if !ok {
		refuse(w, http.StatusNotFound, "there is no such page")
		return
	}
	h := w.Header()
	h.Set("Content-Type", file.kind)
	h.Set("Cache-Control", "no-cache") // the browser asks whether its copy is still right
	h.Set("ETag", file.tag)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(file.data))
}
