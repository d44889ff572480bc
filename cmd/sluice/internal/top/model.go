// Package top is the live view of sluice top: services, endpoints, clients or nodes by
// what they do now.
package top

import (
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
)

// Query is what the view shows. A change of it asks for another stream of frames.
type Query struct {
	By     string // service, endpoint, client or node
	Sort   string
	Filter string
}

// groupings are the views, by their keys.
var groupings = []struct{ key, by, name string }{
	{"1", "service", "services"}, {"2", "service,endpoint", "endpoints"}, {"3", "client", "clients"}, {"4", "node", "nodes"},
}

// sorts are the orders, by their keys.
var sorts = []struct{ key, sort string }{
	{"o", "opened"}, {"n", "open"}, {"b", "bytes"}, {"e", "failed"}, {"c", "connect"}, {"f", "first"}, {"a", "name"},
}

// Model is the state of the view. Create it with New.
type Model struct {
	query Query
	// ask begins the stream of a query. Its frames come as Frame, with the number.
	ask    func(q Query, number int)
	number int // of the stream whose frames count
	node   string

	frame  *api.Frame
	err    error
	paused bool
	cursor int // the selected row

	helping bool // the help is in place of the table
	editing bool
	input   string
	problem string // what is wrong with the input

	width, height int
}

// Frame is a frame of a stream, or the error that ended it.
type Frame struct {
	Number int
	Frame  *api.Frame
	Err    error
}

// New returns a Model that asks for frames by ask.
func New(node string, q Query, ask func(q Query, number int)) *Model {
	return &Model{query: q, ask: ask, node: node, width: 100, height: 30}
}

// Init implements tea.Model.
func (m *Model) Init() tea.Cmd {
	m.again()
	return nil
}

// again asks for frames of the present query.
func (m *Model) again() {
	m.number++
	m.frame, m.err, m.cursor, m.paused = nil, nil, 0, false
	m.ask(m.query, m.number)
}

// Update implements tea.Model.
func (m *Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case Frame:
		if msg.Number == m.number && !m.paused {
			if m.err = msg.Err; msg.Frame != nil {
				m.frame = msg.Frame
				m.move(0)
			}
		}
	case tea.KeyMsg:
		if m.editing {
			m.edit(msg)
			return m, nil
		}
		return m, m.press(msg.String())
	}
	return m, nil
}

// press handles a key.
func (m *Model) press(key string) tea.Cmd {
	if key == "?" || m.helping && key == "esc" {
		m.helping = !m.helping
		return nil
	}
	m.helping = false
	for _, g := range groupings {
		if key == g.key {
			m.query.By = g.by
			m.again()
			return nil
		}
	}
	for _, s := range sorts {
		if key == s.key {
			m.query.Sort = s.sort
			m.again()
			return nil
		}
	}
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "p", " ":
		m.paused = !m.paused
	case "/":
		m.editing, m.input, m.problem = true, m.query.Filter, ""
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "pgup":
		m.move(-m.room())
	case "pgdown":
		m.move(m.room())
	case "home", "g":
		m.move(-len(m.rows()))
	case "end", "G":
		m.move(len(m.rows()))
	case "enter":
		m.descend()
	case "esc", "backspace":
		if m.query.Filter != "" {
			m.query.Filter = ""
			m.again()
		}
	}
	return nil
}

// rows returns the rows of the frame that is shown.
func (m *Model) rows() []api.Rates {
	if m.frame == nil {
		return nil
	}
	return m.frame.Rows
}

// move selects another row.
func (m *Model) move(by int) {
	m.cursor = max(min(m.cursor+by, len(m.rows())-1), 0)
}

// descend shows what the selected row consists of: the endpoints of a service, or the
// services of a client, an endpoint or a node.
func (m *Model) descend() {
	if m.cursor >= len(m.rows()) {
		return
	}
	row := &m.rows()[m.cursor]
	var term, by string
	switch m.query.By {
	case "service":
		term, by = "service="+row.Service, "service,endpoint"
	case "client":
		term, by = "client="+row.Client, "service,endpoint"
	case "node":
		term, by = "node="+row.Node, "service,endpoint"
	default:
		term, by = "endpoint="+row.Endpoint, "client"
	}
	if strings.HasSuffix(term, "=") {
		return
	}
	m.query.Filter = strings.TrimSpace(m.query.Filter + " " + term)
	m.query.By = by
	m.again()
}

// edit handles a key of the filter's line.
func (m *Model) edit(key tea.KeyMsg) {
	switch key.Type {
	case tea.KeyEnter:
		if _, err := filter.Parse(m.input); err != nil {
			m.problem = err.Error()
			return
		}
		m.editing, m.query.Filter = false, strings.TrimSpace(m.input)
		m.again()
	case tea.KeyEsc, tea.KeyCtrlC:
		m.editing = false
	case tea.KeyBackspace:
		if r := []rune(m.input); len(r) > 0 {
			m.input, m.problem = string(r[:len(r)-1]), ""
		}
	case tea.KeyCtrlU:
		m.input, m.problem = "", ""
	case tea.KeyTab:
		m.complete()
	case tea.KeyRunes, tea.KeySpace:
		if len(m.input) < filter.MaxLength {
			m.input, m.problem = m.input+string(key.Runes), ""
		}
	}
}

// complete completes the last word if only one goes on like that; else it shows all.
func (m *Model) complete() {
	found := filter.Complete(m.input, len(m.input), m.values)
	switch len(found.Suggestions) {
	case 0:
	case 1:
		m.input = m.input[:found.Start] + found.Suggestions[0].Text
	default:
		var names []string
		for _, s := range found.Suggestions {
			names = append(names, s.Text)
		}
		m.problem = strings.Join(names, " ")
	}
}

// values returns what the rows show of a field.
func (m *Model) values(field string) (values []string) {
	for _, row := range m.rows() {
		if v := map[string]string{"service": row.Service, "endpoint": row.Endpoint, "client": row.Client, "node": row.Node, "pod": row.Pod}[field]; v != "" {
			values = append(values, v)
		}
	}
	return values
}
