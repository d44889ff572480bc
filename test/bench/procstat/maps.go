package procstat

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Maps is the memory of the BPF maps that a process has open, in bytes, as the kernel states it.
func Maps(pid int) (sum int64) {
	infos, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	seen := make(map[string]bool)
	for _, name := range infos {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // closed meanwhile
		}
		if id, size := parseMap(string(text)); id != "" && !seen[id] {
			seen[id] = true
			sum += size
		}
	}
	return sum
}

// parseMap returns the ID of a map and its size; no ID for another file.
func parseMap(text string) (id string, size int64) {
	for line := range strings.Lines(text) {
		switch key, value, _ := strings.Cut(line, ":"); key {
		case "map_id":
			id = strings.TrimSpace(value)
		case "memlock":
			size, _ = strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		}
	}
	return id, size
}
