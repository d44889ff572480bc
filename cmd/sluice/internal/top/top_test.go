package top

import (
	"errors"
	"strings"
	"testing"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
)

// screen is a Model whose streams a test answers.
type screen struct {
	*Model
	asked []Query
}

func newScreen() *screen {
	s := &screen{}
	s.Model = New("node-a", Query{By: "service", Sort: "opened"}, func(q Query, _ int) { s.asked = append(s.asked, q) })
	s.Init()
	s.Update(tea.WindowSizeMsg{Width: 110, Height: 9})
	return s
}

// press types keys.
func (s *screen) press(keys ...string) tea.Cmd {
	var cmd tea.Cmd
	for _, key := range keys {
		msg := tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(key)}
		for kind, name := range map[tea.KeyType]string{tea.KeyEnter: "enter", tea.KeyEsc: "esc", tea.KeyDown: "down", tea.KeyTab: "tab", tea.KeyBackspace: "backspace",
			tea.KeyPgDown: "pgdown", tea.KeyEnd: "end", tea.KeyHome: "home"} {
			if key == name {
				msg = tea.KeyMsg{Type: kind}
			}
		}
		_, cmd = s.Update(msg)
	}
	return cmd
}

func (s *screen) answer(f *api.Frame) { s.Update(Frame{Number: s.number, Frame: f}) }

var frame = &api.Frame{
	Seconds: 1, Groups: 2, Total: api.Rates{Open: 12, Opened: 3.4, BytesFromClient: 2048},
	Rows: []api.Rates{
		{Service: "shop/web:http", Protocol: "TCP", Open: 10, Opened: 3.4, Failed: 12.2, BytesFromClient: 2048, ConnectP50US: 250, ConnectP99US: 251000, FirstP99US: 400000, DurationP50US: 1000, DurationP99US: 7_200_000_000},
		{Service: "kube-system/dns", Protocol: "UDP", Open: 2},
	},
}

func TestView(t *testing.T) {
	s := newScreen()
	check.Contains(t, s.View(), "measuring")
	s.answer(frame)
	got := strings.NewReplacer(bold, "", plain, "", reverse, ">").Replace(s.View())
	want := `services by opened - sluice top, node node-a

12 open, 3.4 new/s, 0 failed/s, 2 KiB/s up, 0 B/s down, 2 rows
NAME                            OPEN   NEW/s  FAIL/s RETRY/s      UP/s    DOWN/s CONNECT p50     p99  BYTE p99
>shop/web:http                     10     3.4      12       0     2 KiB       0 B       250us   251ms     400ms
kube-system/dns UDP                2       0       0       0       0 B       0 B           -       -         -


1-4 view | sort: o new n open b bytes e err c conn f byte a name | / ? help q quit`
	check.Textf(t, got, want, "the view")
}

// A wide screen shows how long connections lasted.
func TestWideView(t *testing.T) {
	s := newScreen()
	s.Update(tea.WindowSizeMsg{Width: 160, Height: 9})
	s.answer(frame)
	got := strings.NewReplacer(bold, "", plain, "", reverse, ">").Replace(s.View())
	for _, want := range []string{"  LAST p50  LAST p99\n", "       1ms      2h0m\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestKeys(t *testing.T) {
	s := newScreen()
	s.answer(frame)
	s.press("b")
	s.answer(frame)
	s.press("down", "enter") // into dns
	s.press("/")
	s.press(strings.Split(" end=client_re", "")...)
	s.press("tab", "enter")
	s.press("3", "esc")
	want := []Query{
		{"service", "opened", ""},
		{"service", "bytes", ""},
		{"service,endpoint", "bytes", "service=kube-system/dns"},
		{"service,endpoint", "bytes", "service=kube-system/dns end=client_reset"},
		{"client", "bytes", "service=kube-system/dns end=client_reset"},
		{"client", "bytes", ""},
	}
	for i := range max(len(want), len(s.asked)) {
		if i >= len(want) || i >= len(s.asked) || s.asked[i] != want[i] {
			t.Fatalf("asked %+v\nwant %+v", s.asked, want)
		}
	}
	s.press("/", "x", "=", "1", "enter")
	if !s.editing || !strings.Contains(s.View(), `there is no field "x"`) || len(s.asked) != len(want) {
		t.Errorf("a wrong filter was taken:\n%s", s.View())
	}
	s.press("esc")
	if s.editing {
		t.Error("esc does not leave the filter")
	}
	s.answer(frame)
	s.press("p")
	s.answer(&api.Frame{})
	if !strings.Contains(s.View(), "paused") || len(s.frame.Rows) != 2 {
		t.Errorf("a paused view changes:\n%s", s.View())
	}
	s.press("p")
	s.Update(Frame{Number: s.number - 1, Frame: &api.Frame{}}) // of an older stream
	check.Equalf(t, len(s.frame.Rows), 2, "a frame of an older stream is shown")
	s.Update(Frame{Number: s.number, Err: errors.New("the proxy has ended")})
	check.Contains(t, s.View(), "the proxy has ended")
	if cmd := s.press("q"); cmd == nil {
		t.Error("q does not end the view")
	}
}

// A name cannot move the cursor.
func TestHostileName(t *testing.T) {
	s := newScreen()
	s.answer(&api.Frame{Rows: []api.Rates{{Service: "shop/\x1b[2Jweb"}}})
	if strings.Contains(s.View(), "\x1b[2J") {
		t.Error("a name's escape sequence reaches the terminal")
	}
}

// Each size of a terminal shows the names, the column that the rows are sorted by, and
// how to leave.
func TestSizes(t *testing.T) {
	long := "shop/cart-with-a-long-name:http"
	for _, tt := range []struct {
		width, height int
		by, sort      string
		want          []string
	}{
		{200, 50, "service", "opened", []string{"RETRY/s", "p99", long, "enter into, / filter, esc all, p pause, ? help, q quit"}},
		{200, 50, "service,endpoint", "opened", []string{"RETRY/s", "p99", long + " [fd00:10:244::11]:8080 shop/cart-2"}},
		{80, 24, "service", "opened", []string{long, "OPEN", "NEW/s", "FAIL/s", "DOWN/s", "BYTE p99", "q quit"}},
		{80, 24, "service,endpoint", "connect", []string{"[fd00:10:244::11]:8080 shop/cart-2", "OPEN", "NEW/s", "p99", "q quit"}},
		{40, 10, "service", "opened", []string{"services by opened", "shop/cart-with-~", "OPEN", "NEW/s", "FAIL/s", "q quit"}},
		{40, 10, "service", "connect", []string{"services by connect", "shop/cart-", "OPEN", "NEW/s", "p99", "q quit"}},
		{20, 4, "service", "opened", []string{"OPEN"}},
		{1, 1, "service", "opened", nil},
	} {
		s := newScreen()
		s.query.By, s.query.Sort = tt.by, tt.sort
		s.Update(tea.WindowSizeMsg{Width: tt.width, Height: tt.height})
		r := api.Rates{Service: long, Protocol: "TCP", Open: 10}
		if tt.by != "service" {
			r.Endpoint, r.Pod = "[fd00:10:244::11]:8080", "shop/cart-2"
		}
		s.answer(&api.Frame{Groups: 1, Rows: []api.Rates{r}})
		got := strings.NewReplacer(bold, "", plain, "", reverse, "").Replace(s.View())
		for _, want := range tt.want {
			if !strings.Contains(got, want) {
				t.Errorf("%d x %d, %s by %s: lacks %q:\n%s", tt.width, tt.height, tt.by, tt.sort, want, got)
			}
		}
		for line := range strings.Lines(got) {
			if n := len(strings.TrimSuffix(line, "\n")); n > tt.width {
				t.Errorf("%d x %d: a line has %d characters: %q", tt.width, tt.height, n, line)
			}
		}
	}
}

// Keys move by a row, by a screen and to the ends, and what is typed stays in sight.
func TestMoving(t *testing.T) {
	s := newScreen() // 4 rows have room
	s.answer(&api.Frame{Rows: make([]api.Rates, 50)})
	for _, step := range []struct {
		key  string
		want int
	}{{"down", 1}, {"k", 0}, {"k", 0}, {"pgdown", 4}, {"end", 49}, {"j", 49}, {"home", 0}, {"G", 49}, {"g", 0}} {
		if s.press(step.key); s.cursor != step.want {
			t.Errorf("after %s row %d is selected, want %d", step.key, s.cursor, step.want)
		}
	}
	s.press("end")
	s.answer(&api.Frame{Rows: make([]api.Rates, 3)})
	check.Equalf(t, s.cursor, 2, "the selected row of 3")
	s.answer(&api.Frame{})
	s.press("enter", "down", "end")
	check.Equalf(t, s.cursor, 0, "the selected row of none")
	s.Update(tea.WindowSizeMsg{Width: 40, Height: 10})
	s.press("/")
	s.press(strings.Split("service=shop/cart-with-a-long-name endpoint=10.1.2.3", "")...)
	check.Contains(t, s.View(), "long-name endpoint=10.1.2.3_\n")
}

// A printed table has whole names.
func TestTable(t *testing.T) {
	long := strings.Repeat("a", 63) + "/" + strings.Repeat("b", 63) + ":http [fd00:10:244::11]:8080 shop/cart-2"
	service, rest, _ := strings.Cut(long, " ")
	endpoint, pod, _ := strings.Cut(rest, " ")
	got := Table(&api.Frame{Rows: []api.Rates{{Service: "shop/web", Open: 3}, {Service: service, Endpoint: endpoint, Pod: pod, Open: 12}}})
	lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "NAME ") || !strings.HasPrefix(lines[1], "shop/web ") || !strings.HasPrefix(lines[2], long+" ") {
		t.Fatalf("the table is\n%s", got)
	}
	for i, line := range lines {
		check.Equalf(t, len(line), len(lines[0]), "bytes of line %d", i)
	}
}

// The help replaces the table on any terminal, and the next key does what it says.
func TestHelp(t *testing.T) {
	s := newScreen()
	s.answer(frame)
	table := s.View()
	s.press("?")
	for _, size := range [][2]int{{80, 24}, {40, 8}, {110, 9}} {
		s.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		view := strings.NewReplacer(bold, "", plain, "").Replace(s.View())
		lines := strings.Split(view, "\n")
		if len(lines) != size[1] || !strings.Contains(view, "services, endpoints, clients") || strings.Contains(view, "NEW/s") {
			t.Errorf("%v: %d lines:\n%s", size, len(lines), view)
		}
		for _, line := range lines {
			if len(line) > size[0] {
				t.Errorf("%v: too long: %s", size, line)
			}
		}
		check.Equalf(t, size[1] >= len(help)+5, strings.Contains(view, help[len(help)-1]), "%v: the end of the help:\n%s", size, view)
	}
	s.press("esc")
	if s.View() != table || s.query.Filter != "" {
		t.Errorf("after the help:\n%s", s.View())
	}
	s.press("?", "2")
	if s.query.By != "service,endpoint" || s.helping {
		t.Errorf("%+v", s.query)
	}
}

// Rows of several proxies name the node of each.
func TestTableOfNodes(t *testing.T) {
	got := Table(&api.Frame{Rows: []api.Rates{{ProxyNode: "node-a", Service: "shop/web:http"}, {ProxyNode: "node-bb", Service: "shop/web:http"}}})
	lines := strings.Split(got, "\n")
	for i, want := range []string{"PROXY NODE  NAME", "node-a      shop/web:http", "node-bb     shop/web:http"} {
		if !strings.HasPrefix(lines[i], want) {
			t.Errorf("line %d is %q, want it to begin with %q", i, lines[i], want)
		}
	}
}
