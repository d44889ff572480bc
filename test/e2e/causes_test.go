package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/cause"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestQuestionNamesTheRightPod: one of three endpoints is slow, resets, refuses, cannot be
// reached, is full, has gone from its link or is silent, or a rule drops what goes there. The command that docs/observing.md
// gives names its pod first with the reason, and so does the page's API; test/web asks the page.
func TestQuestionNamesTheRightPod(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		for _, c := range cause.All {
			t.Run(path+"/"+c.Name, func(t *testing.T) {
				t.Parallel()
				askWhich(t, &c, path)
			})
		}
	}
}

func askWhich(t *testing.T, c *cause.Cause, path string) {
	lab := c.Lab(t)
	p := newProxy(t, lab.Node)
	p.write("web.yaml", c.Manifest(lab))
	p.start("--datapath", path, "--web-bind-address=:10261", "--dial-timeouts="+cause.DialTimeouts)
	c.Play(t, lab)
	wait.For(t, "sluice "+c.Command+" names the pod", startTimeout, func() error {
		out, err := sluice(t, lab, strings.Fields(c.Command)...)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		_, rows, _ := strings.Cut(out, "\n")
		for i, row := range strings.Split(rows, "\n") {
			switch {
			case !strings.Contains(row, cause.Pod):
				return fmt.Errorf("row %d: want %s first, which is %s:\n%s", i+1, cause.Pod, c.Says, out)
			case strings.Contains(row, c.Says):
				return nil
			}
		}
		return errors.New(out)
	})
	wait.For(t, "the page's first row is of the pod", startTimeout, func() error {
		r, err := p.scraper().Get("http://127.0.0.1:10261/v1/rates?by=service,endpoint&interval=2s&sort=" + c.Sort)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		var f api.Frame
		if err := json.NewDecoder(r.Body).Decode(&f); err != nil || r.StatusCode != http.StatusOK {
			return fmt.Errorf("%s %w", r.Status, err)
		}
		if len(f.Rows) == 0 || f.Rows[0].Pod != cause.Pod {
			return fmt.Errorf("the rows are %+v", f.Rows)
		}
		return nil
	})
}
