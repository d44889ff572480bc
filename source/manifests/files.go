package manifests

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// maxTreeDepth is how deeply directories may be nested below the watched one.
	maxTreeDepth = 32
	// maxDirs is how many directories are read, and watched, in all, and
	// maxLinkedDirs how many of them behind symlinks: these may lead anywhere.
	maxDirs       = 4096
	maxLinkedDirs = 256
	// maxTreeFindings bounds the findings about directories and symlinks.
	maxTreeFindings = 100
)

// foundFile is a file of the tree that has a manifest's name.
type foundFile struct {
	path   string      // relative to the root, with slashes
	info   fs.FileInfo // of the file itself, behind symlinks; nil if err is set
	target string      // the file behind a symlink, else ""
	err    error       // why it cannot be read
}

// tree is what a walk finds.
type tree struct {
	files []foundFile
	dirs  []string // the directories that were walked, as paths that can be opened
	// kept are relative directories that could not be read; the known files
	// below them stay.
	kept     []string
	near     []string // files with nearly a manifest's name
	findings []finding
}

// walker walks a directory tree. It skips names that begin with a dot: files of
// editors and version control, and the ..data directories of mounted ConfigMaps,
// whose files are found through symlinks.
type walker struct {
	root  string
	calls *calls
	// enter is called for each directory before it is read, so that a watch set
	// by enter sees every later change.
	enter func(dir string)

	tree   tree
	above  []fs.FileInfo // the directories that the root is in
	walked []fs.FileInfo // the directories that were walked
	linked int           // those of them that were found through symlinks
	full   bool          // a bound was told of
	later  []symlinkedDir
}

// symlinkedDir is a symlink to a directory. It is walked last, and only if its
// target was not, so that no file is read twice and loops end.
type symlinkedDir struct {
	rel       string
	info      fs.FileInfo
	ancestors []fs.FileInfo
}

// errReplaced says that the root was a different directory after the walk.
var errReplaced = errors.New("another directory keeps taking its place")

// walk finds the manifests below root. The error is that of the root itself. If the
// root is moved away during the walk, its files must not look deleted, so it must be
// the same directory before and after.
func walk(root string, p *calls, enter func(dir string)) (tree, error) {
	for range 5 {
		before, err := statDir(root)
		if err != nil {
			return tree{}, err
		}
		t, err := walkOnce(root, before, p, enter)
		if err != nil {
			return tree{}, err
		}
		after, err := statDir(root)
		if err != nil {
			return tree{}, err
		}
		if os.SameFile(before, after) {
			return t, nil
		}
	}
	return tree{}, &fs.PathError{Op: "read", Path: root, Err: errReplaced}
}

func statDir(name string) (fs.FileInfo, error) {
	info, err := os.Stat(name)
	if err == nil && !info.IsDir() {
		err = &fs.PathError{Op: "read", Path: name, Err: errors.New("not a directory")}
	}
	return info, err
}

func walkOnce(root string, info fs.FileInfo, p *calls, enter func(dir string)) (tree, error) {
	w := walker{root: root, calls: p, enter: enter, above: above(root)}
	if err := w.dir(".", info, nil, false); err != nil {
		return tree{}, err
	}
	for len(w.later) > 0 {
		l := w.later[0]
		w.later = w.later[1:]
		if containsFile(l.ancestors, l.info) || containsFile(w.above, l.info) {
			w.problem(l.rel, "is a symlink to a directory that it is in itself: it is passed over")
			continue
		}
		if !containsFile(w.walked, l.info) {
			w.subdir(l.rel, l.info, l.ancestors, true)
		}
	}
	return w.tree, nil
}

func containsFile(infos []fs.FileInfo, info fs.FileInfo) bool {
	return slices.ContainsFunc(infos, func(i fs.FileInfo) bool { return os.SameFile(i, info) })
}

// above returns the parents of a directory, with symlinks resolved.
func above(dir string) (list []fs.FileInfo) {
	if target, err := filepath.EvalSymlinks(dir); err == nil {
		dir = target
	}
	for dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
		if info, err := os.Stat(dir); err == nil {
			list = append(list, info)
		}
	}
	return list
}

func (w *walker) problem(rel, format string, args ...any) {
	if len(w.tree.findings) >= maxTreeFindings {
		return
	}
	w.tree.findings = append(w.tree.findings, finding{file: rel, text: fmt.Sprintf(format, args...)})
}

// dir walks one directory. The error says that it could not be read at all.
func (w *walker) dir(rel string, info fs.FileInfo, ancestors []fs.FileInfo, linked bool) error {
	full := filepath.Join(w.root, filepath.FromSlash(rel))
	switch kernel, err := sys.KernelFileSystem(full); {
	case err != nil:
		return err
	case kernel != "":
		return fmt.Errorf("is a directory of %s: it is passed over", kernel)
	}
	if linked {
		w.linked++
	}
	w.walked = append(w.walked, info)
	w.tree.dirs = append(w.tree.dirs, full)
	w.enter(full)
	entries, err := os.ReadDir(full)
	if err != nil {
		return err
	}
	ancestors = append(ancestors[:len(ancestors):len(ancestors)], info)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			w.entry(path.Join(rel, e.Name()), e, ancestors, linked)
		}
	}
	return nil
}

// subdir walks a directory below the root. Beyond the bound, known files of a
// directory stay.
func (w *walker) subdir(rel string, info fs.FileInfo, ancestors []fs.FileInfo, linked bool) {
	if len(ancestors) > maxTreeDepth {
		w.problem(rel, "directories are nested too deeply: it is passed over")
		return
	}
	if len(w.walked) >= maxDirs || linked && w.linked >= maxLinkedDirs {
		w.tree.kept = append(w.tree.kept, rel)
		if !w.full {
			w.full = true
			w.problem(rel, "there are more than %d directories, or %d behind symlinks: this one and those that follow are passed over", maxDirs, maxLinkedDirs)
		}
		return
	}
	if err := w.dir(rel, info, ancestors, linked); err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.tree.kept = append(w.tree.kept, rel)
		w.problem(rel, "%s", ioText(err))
	}
}

func (w *walker) entry(rel string, e fs.DirEntry, ancestors []fs.FileInfo, linked bool) {
	full := filepath.Join(w.root, filepath.FromSlash(rel))
	f := foundFile{path: rel}
	if e.Type()&fs.ModeSymlink != 0 {
		found, err := within(w.calls, full, func() (found foundFile) {
			found.info, found.err = os.Stat(full)
			found.target, _ = filepath.EvalSymlinks(full)
			return found
		})
		if f.info, f.target, f.err = found.info, found.target, found.err; err != nil {
			f.err = err
		}
	} else {
		f.info, f.err = e.Info()
		if errors.Is(f.err, fs.ErrNotExist) {
			return // gone since the directory was read
		}
	}
	switch {
	case f.err == nil && f.info.IsDir() && e.Type()&fs.ModeSymlink != 0:
		w.later = append(w.later, symlinkedDir{rel, f.info, ancestors})
	case f.err == nil && f.info.IsDir():
		w.subdir(rel, f.info, ancestors, linked)
	case isManifest(rel):
		if f.err == nil && !f.info.Mode().IsRegular() {
			f.err = fmt.Errorf("is %s: only regular files are read", sys.Kind(f.info.Mode()))
		}
		w.tree.files = append(w.tree.files, f)
	case isNearlyManifest(rel) && len(w.tree.near) < maxTreeFindings:
		w.tree.near = append(w.tree.near, rel)
	}
}

// isManifest reports whether a file's name is that of a manifest.
func isManifest(name string) bool {
	base := path.Base(name)
	if strings.HasPrefix(base, ".") {
		return false
	}
	switch path.Ext(base) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// isNearlyManifest reports whether a file was probably meant to be a manifest: as .yaml.txt
// or .YAML.
func isNearlyManifest(name string) bool {
	return isManifest(strings.TrimSuffix(strings.ToLower(name), ".txt"))
}

// readFile reads a file of at most limit bytes.
func readFile(name string, limit int64) ([]byte, fs.FileInfo, error) {
	f, err := sys.OpenRegular(name)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if info.Size() > limit {
		return nil, info, tooLargeError{info.Size(), limit}
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = tooLargeError{int64(len(data)), limit}
	}
	return data, info, err
}

// tooLargeError says that a file is larger than --max-manifest-size.
type tooLargeError struct{ size, limit int64 }

func (e tooLargeError) Error() string {
	return fmt.Sprintf("has %d bytes, more than the %d that --max-manifest-size allows: make several files of it", e.size, e.limit)
}

// ioText returns the text of an error about a file, without the file's name.
func ioText(err error) string {
	var pe *fs.PathError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "cannot be read: it is a symlink to a file that does not exist"
	case errors.As(err, &pe):
		return "cannot be read: " + pe.Err.Error()
	}
	return err.Error()
}
