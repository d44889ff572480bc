package printable

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestText(t *testing.T) {
	for _, c := range [][2]string{
		{"", ""},
		{`spec.ports[0].port: "x" is not a number`, `spec.ports[0].port: "x" is not a number`},
		{"grün ✓", "grün ✓"},
		{"a\nb\x1b[2J\x7f", `a\nb\x1b[2J\x7f`},
		{"\u009b2J\u202eabc\u200b\u2028", `\u009b2J\u202eabc\u200b\u2028`},
		{"a\xffb\ufffd", `a\xffb` + "\ufffd"},
	} {
		check.Equalf(t, Text(c[0]), c[1], "%q", c[0])
	}
}

func TestName(t *testing.T) {
	for _, c := range [][2]string{
		{"", ""},
		{"default/web:http", "default/web:http"},
		{"10.0.0.1%eth0", "10.0.0.1%eth0"},
		{"web | client_fin", `"web | client_fin"`},
		{"web,zone", `"web,zone"`},
		{`we"b`, `"we\"b"`},
		{"grün", `"grün"`},
		{"a\u202eb", `"a\u202eb"`},
	} {
		if got := Name(c[0]); got != c[1] || string(AppendName(nil, c[0])) != c[1] {
			t.Errorf("%q: %q, want %q", c[0], got, c[1])
		}
	}
	check.Equalf(t, testing.AllocsPerRun(100, func() { _, _ = Text("default/web"), Name("default/web") }), 0, "allocations")
}

// FuzzAll wants every form to print, and JSON to mean the same as before.
func FuzzAll(f *testing.F) {
	for _, s := range []string{"web", "\x1b[2J", "a\nb", "\u009b\u202e", "\xff", "\U000e0001", "\U0001f600", `\"`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, out := range []string{Text(s), Name(s)} {
			if i := strings.IndexFunc(out, func(r rune) bool { return !strconv.IsPrint(r) }); i >= 0 || !utf8.ValidString(out) {
				t.Fatalf("%q becomes %q", s, out)
			}
		}
		if name := Name(s); name != s {
			if back, err := strconv.Unquote(name); err != nil || back != s {
				t.Fatalf("%q becomes %s, and that %q", s, name, back)
			}
		}
		line := must.Get(json.Marshal(map[string]string{"a": s}))(t)
		out := string(JSON(line))
		if i := strings.IndexFunc(out, func(r rune) bool { return !strconv.IsPrint(r) }); i >= 0 {
			t.Fatalf("%q becomes %q", line, out)
		}
		var before, after map[string]string
		if json.Unmarshal(line, &before) != nil || json.Unmarshal([]byte(out), &after) != nil || before["a"] != after["a"] {
			t.Fatalf("%q becomes %q", line, out)
		}
	})
}
