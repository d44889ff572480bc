package manifests

import (
	"slices"
	"strconv"
	"strings"
)

// finding is an error in a file, which keeps the file's new content from taking
// effect, or a warning, which does not.
type finding struct {
	file    string // relative to the watched directory, with slashes
	line    int    // 1 is the first; 0 when no line is to blame
	object  string // "Service default/web", or "" when the file itself is meant
	text    string // what is wrong and what would be right
	warning bool
}

// String returns one line: "web.yaml:12: Service default/web: spec.ports[0].port:
// 0 is not in 1..65535".
func (f finding) String() string {
	var b strings.Builder
	b.WriteString(f.file)
	if f.line > 0 {
		b.WriteByte(':')
		b.WriteString(strconv.Itoa(f.line))
	}
	b.WriteString(": ")
	if f.object != "" {
		b.WriteString(f.object)
		b.WriteString(": ")
	}
	b.WriteString(f.text)
	return b.String()
}

// hasErrors reports whether one of the findings is an error.
func hasErrors(fs []finding) bool {
	return slices.ContainsFunc(fs, func(f finding) bool { return !f.warning })
}

// firstError returns the first error; "" if there are only warnings.
func firstError(fs []finding) string {
	if i := slices.IndexFunc(fs, func(f finding) bool { return !f.warning }); i >= 0 {
		return fs[i].String()
	}
	return ""
}
