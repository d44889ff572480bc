package main

import (
	"io"
	"strings"
	"testing"
)

// A flag that would do nothing is an error.
func TestTimeWithoutVerbosity(t *testing.T) {
	cmd := newStatusCommand()
	cmd.SetArgs([]string{"--for", "1h", "--admin-socket", "/nowhere"})
	cmd.SetErr(io.Discard)
	cmd.SetOut(io.Discard)
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "--set-v") {
		t.Errorf("--for alone: %v", err)
	}
}
