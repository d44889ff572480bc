package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise7_GoodContentOfBrokenManifestsMoves: a manifest that is broken when a process takes over keeps
// its last good content, over one take-over and the next, until it is mended.
func TestPromise7_GoodContentOfBrokenManifestsMoves(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	web, large := webOn(lab), webOn(lab)
	web.endpoints, large.endpoints = on(8080, lab.Backends[0]), on(8080, lab.Backends[0])
	large.name, large.vips = "large", []string{"10.96.0.11"}
	p := prepareProxy(t, lab, []webService{web})
	p.write("large.yaml", large.annotated(fmt.Sprintf("example.com/note: %q", strings.Repeat("x", 200<<10)))) // more than a message
	p.start()
	targets := []string{addresses(80, vip4)[0], addresses(80, large.vips...)[0]}
	for _, name := range []string{"web.yaml", "large.yaml"} {
		p.write(name, "kind: Service\n  apiVersion: v1\n")
		p.awaitLog(name)
	}
	held := hold(t, lab.Client, targets[1], 3)
	for range 2 {
		next := *p
		next.start("--take-over")
		p.waitExit()
		p = &next
		for _, target := range targets {
			check.OKf(t, onlyOn(lab.Client, target, "b1:8080"), "%s, while its file is broken", target)
		}
		alive(t, held)
		if says := regexp.MustCompile(`"in_force":"last good content",.*"message":"(web|large)\.yaml:`); len(says.FindAllString(p.stderr.String(), -1)) != 2 {
			t.Error("the log does not say what is in force")
		}
		wait.For(t, "the status names the files", startTimeout, func() error {
			if out, err := sluice(t, lab, "status"); err == nil || !strings.Contains(out, "NOT all is in force: 2 manifests are in error: large.yaml:") {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
	}
	web.endpoints = on(8080, lab.Backends[1])
	p.apply(web)
	wait.For(t, "the mended file is in force", startTimeout, func() error { return onlyOn(lab.Client, targets[0], "b2:8080") })
	p.remove("large")
	wait.For(t, "the deleted file's service is gone", startTimeout, func() error { return unanswered(lab.Client, targets[1]) })
	p.stop()
}
