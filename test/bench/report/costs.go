package report

import (
	"fmt"
	"strings"
)

// costs are what the page says of CPU time: the whole machine's, which has all the kernel's
// work, and the relay's own. Metrics are in seconds for each 100,000, or for each GB.
var costs = []struct {
	title, machine, relay string
	factor                float64 // to the title's unit
}{
	{"a connection with a request [us]", "crc.machine", "crc.cpu", 10},
	{"a request [us]", "rr64.machine", "rr64.cpu", 10},
	{"a GB [ms]", "bulk1.machine", "bulk1.cpu", 1000},
	{"a UDP request [us]", "udp-rr64.machine", "udp-rr64.cpu", 10},
}

// Costs writes the CPU time that each peer takes, in one table.
func (d *Data) Costs() string {
	var b strings.Builder
	b.WriteString("| CPU time of the whole machine (of the relay alone) |")
	for _, c := range costs {
		fmt.Fprintf(&b, " %s |", c.title)
	}
	b.WriteString("\n|---|" + strings.Repeat("---:|", len(costs)) + "\n")
	for _, peer := range d.having(false) {
		row, measured := "| "+peer+" |", false
		for _, c := range costs {
			machine, ok := d.Spread(peer, c.machine)
			if !ok {
				row += " |"
				continue
			}
			measured = true
			row += " " + Number(machine.Median*c.factor)
			if relay, ok := d.Spread(peer, c.relay); ok {
				row += " (" + Number(relay.Median*c.factor) + ")"
			}
			row += " |"
		}
		if measured {
			b.WriteString(row + "\n")
		}
	}
	return b.String()
}
