package top

import "strings"

// help is what ? shows: lines for 80 columns, of which a small terminal shows the first.
var help = []string{
	"1-4      services, endpoints, clients, nodes",
	"enter    into the selected row: a service's endpoints, an endpoint's clients",
	"/        edit the filter; tab completes it, and docs/admin-api.md lists its fields",
	"esc      all again, without a filter",
	"o n b    sort by new, by open connections, by bytes to clients",
	"e c f a  sort by failures, by connecting (p99), by the first byte (p99), by name",
	"j k      move down and up, as arrows, page keys, home and end do",
	"p        pause, or go on",
	"q        quit",
	"FAIL/s   connections that reached no endpoint, or that their endpoint broke",
	"RETRY/s  failed attempts, after which another endpoint may have served the client",
	"CONNECT  time until an endpoint answered; BYTE: until its first byte; both from",
	"         the acceptance of the connection; LAST: until its end",
}

// writeHelp writes the help in place of the table.
func (m *Model) writeHelp(b *strings.Builder) {
	b.WriteString(bold + cut("keys and columns (? or esc: back)", m.width) + plain + "\n")
	for i := range m.room() {
		if i < len(help) {
			b.WriteString(cut(help[i], m.width))
		}
		b.WriteByte('\n')
	}
}
