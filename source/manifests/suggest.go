package manifests

import (
	"fmt"
	"reflect"
	"strings"
)

// suggest gives `; did you mean "targetPort"?` when the type has a field beside
// the unknown one at the path's end that is spelled nearly so, else "".
func suggest(t reflect.Type, path string) string {
	parts := strings.Split(strings.ReplaceAll(withoutIndices(path), "[]", ""), ".")
	name := parts[len(parts)-1]
	for _, part := range parts[:len(parts)-1] {
		if t = fieldType(t, part); t == nil {
			return ""
		}
	}
	best, bestDistance := "", 3
	eachField(t, func(field string, _ reflect.Type) {
		if d := distance(strings.ToLower(name), strings.ToLower(field)); d < bestDistance && d < len(field)/2 {
			best, bestDistance = field, d
		}
	})
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

// fieldType gives the type of a field, nil if there is none.
func fieldType(t reflect.Type, name string) (found reflect.Type) {
	eachField(t, func(field string, of reflect.Type) {
		if field == name {
			found = of
		}
	})
	return found
}

// eachField goes through the JSON names of a struct, of what a pointer leads to,
// or of a list's elements.
func eachField(t reflect.Type, each func(name string, t reflect.Type)) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return
	}
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			each(name, f.Type)
		}
	}
}

// distance is the Levenshtein distance: how many letters have to be added,
// dropped or replaced to make b from a.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(row[j]+1, row[j+1]+1, replace)
		}
	}
	return row[len(b)]
}
