package web

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/sluice-proxy/sluice/test/bpffs"
	"github.com/sluice-proxy/sluice/test/cause"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestQuestionNamesTheRightPod asks the page what docs/observing.md has the commands asked: one of
// three endpoints is slow, resets, refuses, cannot be reached, is full, has gone from its link or is
// silent, or a rule drops what goes there. A click on a column has its pod first; a click on the pod
// names the reason; the map marks it alone.
func TestQuestionNamesTheRightPod(t *testing.T) {
	bin := program(t)
	b := open(t, "about:blank")
	for _, path := range []string{"relay", "kernel"} {
		for _, c := range cause.All {
			t.Run(path+"/"+c.Name, func(t *testing.T) {
				url := serveLab(t, bin, &c, path)
				b.t = t
				b.run(chromedp.Navigate(url))
				askPage(t, b, &c)
				b.run(chromedp.Navigate("about:blank")) // before its proxy ends
				b.quiet()
			})
		}
	}
}

// serveLab starts a lab, its proxy and clients, and returns the address of its page, which is
// reached from outside of the lab.
func serveLab(t *testing.T, bin string, c *cause.Cause, path string) (url string) {
	t.Helper()
	lab := c.Lab(t)
	pins, unmount, err := bpffs.Open()
	must.OK(t, err)
	t.Cleanup(unmount)
	dir := t.TempDir()
	manifests, socket := filepath.Join(dir, "manifests"), filepath.Join(dir, "admin.sock")
	must.OK(t, os.Mkdir(manifests, 0o755))
	must.OK(t, os.WriteFile(filepath.Join(manifests, "web.yaml"), []byte(c.Manifest(lab)), 0o600))
	proxy := lab.Node.Command(t, bin, "run", "--manifests", manifests, "--hostname-override", "node", "--service-cidr", "10.96.0.0/16", "--access-log", "off",
		"--bpf-root", pins, "--admin-socket", socket, "--datapath", path, "--dial-timeouts", cause.DialTimeouts, "--logging-format", "json")
	var log output.Text
	proxy.Stderr = &log
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the proxy says:\n%s", log.String())
		}
	})
	must.OK(t, proxy.Start())
	wait.For(t, "the proxy is ready", patience, func() error {
		if !log.Contains(`"message":"ready"`) {
			return errors.New(log.String())
		}
		return nil
	})
	c.Play(t, lab)
	var said output.Text
	page := exec.CommandContext(t.Context(), bin, "web", "--listen", "127.0.0.1:0", "--admin-socket", socket)
	page.Stderr, page.SysProcAttr = &said, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.OK(t, page.Start())
	t.Cleanup(func() { _ = page.Wait() })
	wait.For(t, "the page has an address", patience, func() error {
		if url = pageURL.FindString(said.String()); url == "" {
			return errors.New(said.String())
		}
		return nil
	})
	return url
}

var pageURL = regexp.MustCompile(`http://\S+/`)

// askPage asks as a person does.
func askPage(t *testing.T, b *browser, c *cause.Cause) {
	t.Helper()
	_, pod, _ := strings.Cut(cause.Pod, "/")
	if c.Fails {
		b.await("the map marks the pod alone", fmt.Sprintf(`[...document.querySelectorAll(".node.endpoint[data-bad]")].map((n) => n.querySelector(".name").textContent).join() === %q`, pod))
	}
	b.visit("#/endpoints")
	head := fmt.Sprintf(`[...document.querySelectorAll("main th button")].find((h) => h.textContent === %q)`, c.Column)
	b.await("the column is there", head)
	b.run(chromedp.Evaluate(head+".click()", nil))
	const first = `document.querySelector("main tbody tr")`
	b.await("a click on "+c.Column+" has the pod first", fmt.Sprintf(`%s?.cells[0].innerText === %q`, first, cause.Pod))
	if !c.Fails {
		cell := fmt.Sprintf(`%s.cells[[...document.querySelectorAll("main th")].findIndex((h) => h.textContent === %q)].textContent`, first, c.Column)
		b.await("its figure says it", fmt.Sprintf(`/^full$|^[5-9]\d\d ms|^\d(\.\d+)? s/.test(%s)`, cell))
		return
	}
	b.run(chromedp.Evaluate(first+".click()", nil))
	b.await("a click on the pod says "+c.Says, fmt.Sprintf(`[...document.querySelectorAll("#panel section")].find((s) => s.querySelector("h3").textContent === "Last failures")?.innerText.includes(%q)`, c.Says))
}
