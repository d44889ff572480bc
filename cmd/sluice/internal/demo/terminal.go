package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/term"
)

// printer writes for people: with colour on a terminal, plain otherwise. Its
// methods may be called from any goroutine; each writes whole lines.
type printer struct {
	mu     sync.Mutex // keeps lines together
	out    io.Writer
	colour bool
	width  int
}

// The widths that log lines are folded at.
const (
	minWidth     = 60
	maxWidth     = 140
	defaultWidth = 100
)

// newPrinter finds out what the output is.
func newPrinter(out *os.File) *printer {
	p := &printer{out: out, width: defaultWidth}
	if columns, _, err := term.GetSize(int(out.Fd())); err == nil {
		p.colour = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
		if columns > 0 {
			p.width = min(max(columns, minWidth), maxWidth)
		}
	}
	return p
}

// style is a terminal's code for a way to write.
type style string

const (
	plain  style = ""
	bold   style = "1"
	dim    style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	cyan   style = "36"
)

// in returns the text in a style, if there is colour.
func (p *printer) in(s style, text string) string {
	if !p.colour || s == plain || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}

func (p *printer) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, format+"\n", args...)
}

// labelWidth is the width of what stands before each line of a step.
const labelWidth = 10

// labelled writes a text behind a label, folded at the separators.
func (p *printer) labelled(label string, s style, text string, separators ...string) {
	p.folded(label, s, "", fold(text, p.width-labelWidth, separators...))
}

// checked writes a text behind a label and a check mark or a cross.
func (p *printer) checked(label string, held bool, text string) {
	mark, s := "✓ ", green
	if !held {
		mark, s = "✗ ", red
	}
	parts := fold(text, p.width-labelWidth-2, " ")
	parts[0] = p.in(s, mark) + parts[0]
	p.folded(label, plain, "  ", parts)
}

// record writes a line of the access log, folded where its parts begin.
func (p *printer) record(label, text string) {
	p.folded(label, dim, "  ", fold(text, p.width-labelWidth-2, " -> ", " | "))
}

// folded writes the parts of a text behind a label, all but the first with the
// indent.
func (p *printer) folded(label string, s style, indent string, parts []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, part := range parts {
		if i > 0 {
			label, part = "", indent+part
		}
		fmt.Fprintf(p.out, "  %s%s\n", p.in(cyan, pad(label, labelWidth-2)), p.in(s, part))
	}
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 0))
}

// fold cuts a text into parts of at most width characters where that is
// possible: a cut falls before one of the separators, whose first space it
// takes away.
func fold(text string, width int, separators ...string) []string {
	var parts []string
	for utf8.RuneCountInString(text) > width {
		cut := -1
		seen := 0
		for i := range text {
			if seen > width && cut > 0 {
				break
			}
			for _, s := range separators {
				if i > 0 && strings.HasPrefix(text[i:], s) && (seen <= width || cut < 0) {
					cut = i
				}
			}
			seen++
		}
		if cut < 0 {
			break
		}
		parts = append(parts, text[:cut])
		text = text[cut+1:]
	}
	return append(parts, text)
}
