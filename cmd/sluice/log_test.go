package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestLogNamesUnitsAndErrorsOnce: a duration has its unit, and an error that both
// address families have is one line, without a newline of its own.
func TestLogNamesUnitsAndErrorsOnce(t *testing.T) {
	for form, want := range map[string]string{
		"text": `INF error="steering: no route; no table" took=128.3ms`,
		"json": `{"level":"info","took":"128.3ms","error":"steering: no route; no table"`,
	} {
		stderr := must.Get(os.CreateTemp(t.TempDir(), ""))(t)
		saved := os.Stderr
		os.Stderr = stderr
		o := newRunOptions()
		o.logFormat.value = form
		log, flush := newLogger(o)
		os.Stderr = saved
		same := errors.New("no route")
		log.Info().Dur("took", 128300*time.Microsecond).Err(fmt.Errorf("steering: %w", errors.Join(same, same, errors.New("no table")))).AnErr("none", nil).Send()
		flush()
		text, err := os.ReadFile(stderr.Name())
		if err != nil || !strings.Contains(string(text), want) || bytes.Count(text, []byte("\n")) != 1 {
			t.Errorf("%s: %q, %v, want %q", form, text, err, want)
		}
	}
}

// TestCleanupTakesTheFlagsOfRun: the command line of a killed proxy serves again, and
// the help lists only what matters.
func TestCleanupTakesTheFlagsOfRun(t *testing.T) {
	cleanup, run := newCleanupCommand(), newRunCommand()
	if err := cleanup.ParseFlags(append(strings.Fields("--redirect=bind --manifests=/nowhere --access-log off --nft-table=x -v 4"), kubeProxyFlags...)); err != nil {
		t.Error(err)
	}
	check.Equalf(t, cleanup.Flags().Lookup("nft-table").Value.String(), "x", "--nft-table")
	if run.Flags().Lookup("redirect").Hidden || !cleanup.Flags().Lookup("redirect").Hidden || cleanup.Flags().Lookup("nft-table").Hidden {
		t.Error("the help lists the wrong flags")
	}
}

// A device that is no terminal, as in sluice tap > /dev/null.
func TestNullDeviceIsNoTerminal(t *testing.T) {
	null := must.Get(os.Open(os.DevNull))(t)
	defer null.Close()
	if isTerminal(null) {
		t.Errorf("%s counts as a terminal", os.DevNull)
	}
}
