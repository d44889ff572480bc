package manifests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxDepth is how deeply a document may be nested. API objects stay below 20;
// the limit keeps a hostile file from exhausting the stack.
const maxDepth = 64

// syntaxError says where a file stops being YAML or JSON.
type syntaxError struct {
	line int // 0 when the parser does not know
	text string
}

func (e *syntaxError) Error() string { return e.text }

// parseYAML calls each for each document of a stream. The nodes' lines count
// from the beginning of the stream, not of the document.
func parseYAML(data []byte, each func(*yaml.Node)) error {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return yamlSyntaxError(data, err)
		}
		if len(doc.Content) == 1 {
			each(doc.Content[0])
		}
	}
}

var yamlErrorText = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// yamlSyntaxError turns the parser's error into one with the line of the mistake.
func yamlSyntaxError(data []byte, err error) *syntaxError {
	e := &syntaxError{text: strings.TrimPrefix(err.Error(), "yaml: ")}
	if m := yamlErrorText.FindStringSubmatch(err.Error()); m != nil {
		e.line, _ = strconv.Atoi(m[1])
		e.text = m[2]
	}
	if line := firstBadLine(data, e.line, e.text); line > 0 {
		e.line = line
	}
	switch {
	case strings.Contains(e.text, "cannot start any token") && tabIndented(data, e.line):
		e.text += " (the line is indented with a tab; YAML wants spaces)"
	case strings.Contains(e.text, "did not find expected key"):
		e.text += " (is the line indented like its neighbours?)"
	case strings.Contains(e.text, "mapping values are not allowed"):
		e.text += ` (text with ": " in it needs quotes; or the line is indented wrongly)`
	case strings.Contains(e.text, "unexpected end of stream"):
		e.text += " (what begins here with a quote or a bracket is not closed)"
	}
	e.text = "not valid YAML: " + e.text
	return e
}

// maxLineSearch bounds the data that firstBadLine searches.
const maxLineSearch = 1 << 20

// firstBadLine finds the line of a mistake. The parser names the line where the broken
// mapping or list begins, which may be far from it. So firstBadLine looks for the
// shortest beginning of the data, of at least from lines, with the same error. It
// returns 0 if it finds none.
func firstBadLine(data []byte, from int, text string) int {
	ends := lineEnds(data)
	if len(data) > maxLineSearch || len(ends) == 0 {
		return 0
	}
	fails := func(lines int) bool {
		dec := yaml.NewDecoder(bytes.NewReader(data[:ends[lines-1]]))
		for {
			var doc yaml.Node
			if err := dec.Decode(&doc); err != nil {
				return strings.HasSuffix(err.Error(), text)
			}
		}
	}
	// It is usually near: try growing steps until one fails, then bisect.
	lo := min(max(from, 1), len(ends))
	hi := lo
	for step := 1; hi < len(ends) && !fails(hi); step *= 2 {
		lo, hi = hi+1, min(hi+step, len(ends))
	}
	for lo < hi {
		mid := (lo + hi) / 2
		if fails(mid) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// lineEnds returns the offset behind each line.
func lineEnds(data []byte) []int {
	var ends []int
	for i, c := range data {
		if c == '\n' {
			ends = append(ends, i+1)
		}
	}
	if n := len(data); n > 0 && data[n-1] != '\n' {
		ends = append(ends, n)
	}
	return ends
}

// tabIndented reports whether the line has a tab in its indentation.
func tabIndented(data []byte, line int) bool {
	lines := bytes.SplitN(data, []byte("\n"), line+1)
	if line < 1 || len(lines) < line {
		return false
	}
	text := lines[line-1]
	return bytes.ContainsRune(text[:len(text)-len(bytes.TrimLeft(text, " \t"))], '\t')
}

// parseJSON calls each for each document of a file; several may follow each
// other. It makes the same nodes as parseYAML, because JSON is not quite a
// subset of what the YAML parser reads.
func parseJSON(data []byte, each func(*yaml.Node)) error {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	p := jsonParser{data: data, dec: json.NewDecoder(bytes.NewReader(data)), line: 1}
	p.dec.UseNumber()
	for {
		n, err := p.value(0)
		if errors.Is(err, io.EOF) && n == nil {
			return nil
		}
		if err != nil {
			return p.syntaxError(err)
		}
		each(n)
	}
}

type jsonParser struct {
	data   []byte
	dec    *json.Decoder
	line   int // of offset
	offset int
}

// value reads one value. It returns nil and io.EOF if there is none.
func (p *jsonParser) value(depth int) (*yaml.Node, error) {
	tok, err := p.dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, errTooDeep
	}
	p.advance(int(p.dec.InputOffset()))
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: p.line}
	switch t := tok.(type) {
	case string:
		n.Tag, n.Value, n.Style = "!!str", t, yaml.DoubleQuotedStyle
	case json.Number:
		n.Tag, n.Value = "!!int", t.String()
		if strings.ContainsAny(n.Value, ".eE") {
			n.Tag = "!!float"
		}
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(t)
	case nil:
		n.Tag, n.Value = "!!null", "null"
	case json.Delim:
		n.Kind, n.Tag = yaml.SequenceNode, "!!seq"
		if t == '{' {
			n.Kind, n.Tag = yaml.MappingNode, "!!map"
		}
		for p.dec.More() {
			c, err := p.value(depth + 1)
			if err != nil {
				return n, err
			}
			n.Content = append(n.Content, c)
		}
		if _, err := p.dec.Token(); err != nil { // the closing bracket
			return n, err
		}
		p.advance(int(p.dec.InputOffset()))
	}
	return n, nil
}

// advance moves to an offset, counting lines.
func (p *jsonParser) advance(offset int) {
	p.line += bytes.Count(p.data[p.offset:offset], []byte("\n"))
	p.offset = offset
}

func (p *jsonParser) syntaxError(err error) error {
	var se *json.SyntaxError
	at := int(p.dec.InputOffset())
	switch {
	case errors.As(err, &se):
		at = int(se.Offset)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		at, err = len(p.data), errors.New("the file ends in the middle of a value")
	}
	at = min(max(at, 0), len(p.data))
	return &syntaxError{
		line: 1 + bytes.Count(bytes.TrimRight(p.data[:at], "\n"), []byte("\n")),
		text: fmt.Sprintf("not valid JSON: %v", err),
	}
}
