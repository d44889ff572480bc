package e2e

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// ruleCounts is the number of rules in each section of docs/semantics.md.
var ruleCounts = map[int]int{1: 19, 2: 14, 3: 16, 4: 8, 5: 8, 6: 8, 8: 9}

// TestEveryRuleIsShown expects docs/semantics.md to have each rule, with a test
// that names the rule or with a reason, and every test that it names to exist.
func TestEveryRuleIsShown(t *testing.T) {
	text := must.Read(t, "../../docs/semantics.md")
	tests := testSources(t)
	named := regexp.MustCompile("`(\\w+\\.Test\\w+)`")
	for _, m := range named.FindAllStringSubmatch(string(text), -1) {
		if _, ok := tests[m[1]]; !ok {
			t.Errorf("docs/semantics.md names %s, which does not exist", m[1])
		}
	}
	rows := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| (A\d\.\d+) \| [^|]+ \| ([^|]+) \|$`).FindAllStringSubmatch(string(text), -1) {
		rows[m[1]] = m[2]
	}
	total := 0
	for section, count := range ruleCounts {
		for i := range count {
			id := fmt.Sprintf("A%d.%d", section, i+1)
			total++
			shown, ok := rows[id]
			switch {
			case !ok:
				t.Errorf("docs/semantics.md does not have %s", id)
			case !strings.HasPrefix(shown, "`"): // a reason
				if len(strings.Fields(shown)) < 3 {
					t.Errorf("%s: %q is no reason", id, shown)
				}
			default:
				test := named.FindStringSubmatch(shown)
				if test == nil || !carries(tests[test[1]], id) {
					t.Errorf("%s is not in the test that is to show it: %s", id, shown)
				}
			}
		}
	}
	check.Equalf(t, len(rows), total, "rules that docs/semantics.md has")
}

// carries tells whether a test names a rule: "A3.5", or TestA3_5Name.
func carries(source, id string) bool {
	return regexp.MustCompile(`\b`+regexp.QuoteMeta(id)+`\b`).MatchString(source) ||
		strings.Contains(source, "Test"+strings.Replace(id, ".", "_", 1))
}

// testSources returns the text of each test by "folder.Name", with its comment.
func testSources(t *testing.T) map[string]string {
	out := map[string]string{}
	root := os.DirFS("../..")
	err := fs.WalkDir(root, ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := fs.ReadFile(root, file)
		if err != nil {
			return err
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, text, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, decl := range tree.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv != nil || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			from := f.Pos()
			if f.Doc != nil {
				from = f.Doc.Pos()
			}
			base := tree.FileStart
			out[path.Base(path.Dir(file))+"."+f.Name.Name] = string(text[from-base : f.End()-base])
		}
		return nil
	})
	must.OK(t, err)
	return out
}
