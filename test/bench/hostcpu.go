package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/report"
)

// hostCPU measures how much of the host's CPU time a guest takes in each measured time:
// the guest itself cannot know when it had to wait for a CPU. It is the guest's output,
// in which lines say when a measured time begins and ends.
type hostCPU struct {
	group   int
	line    []byte
	began   map[string]time.Duration
	windows map[string]time.Duration
}

// window names a measured time.
func window(round int, peer, column string) string {
	return fmt.Sprintf("%d/%s/%s", round, peer, column)
}

func (h *hostCPU) watch(group int) {
	h.group = group
	h.began, h.windows = map[string]time.Duration{}, map[string]time.Duration{}
}

// Write implements io.Writer.
func (h *hostCPU) Write(text []byte) (int, error) {
	h.line = append(h.line, text...)
	for {
		line, rest, whole := bytes.Cut(h.line, []byte("\n"))
		if !whole {
			return len(text), nil
		}
		h.take(string(line))
		h.line = rest
	}
}

func (h *hostCPU) take(line string) {
	words := strings.Fields(line)
	if len(words) != 3 || words[0] != load.Marker {
		fmt.Fprintln(os.Stderr, line)
		return
	}
	switch used := groupCPU(h.group); words[1] {
	case "begin":
		h.began[words[2]] = used
	case "end":
		h.windows[words[2]] = used - h.began[words[2]]
	}
}

// turnsPerRound is how often each round of the guest is repeated, with another of the four
// peers first in each turn. Figures for a second of CPU time take the turns together: one
// turn is too short for ratios that differ little between rounds.
const turnsPerRound = 4

// addTo adds what each peer did in a second of the guest's CPU time.
func (h *hostCPU) addTo(d *report.Data) {
	type column struct {
		round    int
		peer, id string
	}
	done, used := map[column]float64{}, map[column]time.Duration{}
	for _, s := range d.Samples {
		id, is := strings.CutSuffix(s.Metric, countSuffix)
		if took := h.windows[window(s.Round, s.Peer, id)]; is && took > 0 {
			c := column{s.Round / turnsPerRound, s.Peer, id}
			done[c] += s.Value
			used[c] += took
		}
	}
	for c, n := range done {
		d.Add(c.round, c.peer, c.id+".persecond", n/used[c].Seconds())
	}
}

// countSuffix ends the names of figures that say how much was done in a measured time.
const countSuffix = ".count"

// groupCPU is the CPU time of the living processes of a process group.
func groupCPU(group int) (sum time.Duration) {
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range processes {
		stat, err := os.ReadFile(p + "/stat")
		if err != nil {
			continue // it has ended
		}
		// "pid (name) state parent group": the name may have blanks.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 3 || string(fields[2]) != strconv.Itoa(group) {
			continue
		}
		text, err := os.ReadFile(p + "/schedstat") // CPU time first, in ns
		if err != nil {
			continue
		}
		first, _, _ := strings.Cut(string(text), " ")
		ns, _ := strconv.ParseInt(first, 10, 64)
		sum += time.Duration(ns)
	}
	return sum
}
