package dev

import (
	"fmt"
	"os"
	"strings"
)

// HostsFile keeps a block of names in a hosts file, as of /etc/hosts. Its methods are not
// safe for concurrent use.
type HostsFile struct {
	Path string
}

const (
	blockBegin = "# sluice dev: these lines go when it ends"
	blockEnd   = "# sluice dev: end"
)

// Write replaces the block. It also replaces one that a killed process left. The file is
// written in place, since it may be a mount of its own.
func (h *HostsFile) Write(lines []string) error {
	return h.replace(blockBegin + "\n" + strings.Join(lines, "\n") + "\n" + blockEnd + "\n")
}

// Remove removes the block.
func (h *HostsFile) Remove() error { return h.replace("") }

func (h *HostsFile) replace(block string) error {
	data, err := os.ReadFile(h.Path)
	if err != nil {
		return err
	}
	old := string(data)
	text := old
	if before, rest, ok := strings.Cut(old, blockBegin+"\n"); ok {
		_, after, ok := strings.Cut(rest, blockEnd+"\n")
		if !ok {
			return fmt.Errorf("%s has the line %q without %q: remove these lines by hand", h.Path, blockBegin, blockEnd)
		}
		text = before + after
	}
	if block != "" && text != "" && !strings.HasSuffix(text, "\n") {
		block = "\n" + block
	}
	if text += block; text == old {
		return nil
	}
	info, err := os.Stat(h.Path)
	if err != nil {
		return err
	}
	return os.WriteFile(h.Path, []byte(text), info.Mode().Perm())
}
