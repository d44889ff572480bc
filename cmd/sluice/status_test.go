package main

import (
	"io"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// A flag that would do nothing is an error.
func TestTimeWithoutVerbosity(t *testing.T) {
	cmd := newStatusCommand()
	cmd.SetArgs([]string{"--for", "1h", "--admin-socket", "/nowhere"})
	cmd.SetErr(io.Discard)
	cmd.SetOut(io.Discard)
	check.Errorf(t, cmd.Execute(), "--set-v", "--for alone")
}
