package demo

import (
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestFold(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  []string
	}{
		{"", 10, []string{""}},
		{"short", 10, []string{"short"}},
		{"one two three", 7, []string{"one two", "three"}},
		{"one two three", 8, []string{"one two", "three"}},
		{"one two three", 3, []string{"one", "two", "three"}},
		{"oneandmore two", 3, []string{"oneandmore", "two"}},
		{"indivisible", 3, []string{"indivisible"}},
		{"äöü äöü äöü", 7, []string{"äöü äöü", "äöü"}},
	} {
		got := fold(c.text, c.width, " ")
		check.Equalf(t, strings.Join(got, "\n"), strings.Join(c.want, "\n"), "fold(%q, %d)", c.text, c.width)
	}
	got := fold("a:1 -> b:2 x/y -> c:3 pod | total 5ms | fin", 22, " -> ", " | ")
	if want := "a:1 -> b:2 x/y\n-> c:3 pod | total 5ms\n| fin"; strings.Join(got, "\n") != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Whatever the text, nothing but spaces at the cuts is lost, and only what
// cannot be cut is too long.
func FuzzFold(f *testing.F) {
	f.Add("one two  three four", 6)
	f.Add(" leading and trailing ", 1)
	f.Fuzz(func(t *testing.T, text string, width int) {
		if width < 1 || !utf8.ValidString(text) {
			return
		}
		parts := fold(text, width, " ")
		check.Equalf(t, strings.Join(parts, " "), text, "fold(%q, %d) = %q", text, width, parts)
		for i, p := range parts {
			if utf8.RuneCountInString(p) > width && strings.Contains(strings.TrimPrefix(p, " "), " ") {
				t.Errorf("fold(%q, %d): part %d, %q, is too long", text, width, i, p)
			}
		}
	})
}

func TestPrinterPlain(t *testing.T) {
	out := must.Get(os.CreateTemp(t.TempDir(), "out"))(t)
	defer out.Close()
	p := newPrinter(out)
	p.line("%s", p.in(red, "red"))
	p.labelled("do", bold, strings.Repeat("word ", 30), " ")
	p.checked("seen", false, strings.Repeat("word ", 30))
	p.record("log", strings.Repeat("10.244.0.11:4182", 5)+" -> x | y")
	text := must.Read(t, out.Name())
	if strings.Contains(string(text), "\x1b") {
		t.Errorf("colour in a file: %q", text)
	}
	for line := range strings.Lines(string(text)) {
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > defaultWidth {
			t.Errorf("line is too long: %q", line)
		}
	}
	p.colour = true
	check.Equalf(t, p.in(red, "red"), "\x1b[31mred\x1b[0m", "colour")
}
