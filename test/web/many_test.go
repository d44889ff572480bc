package web

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/sluice-proxy/sluice/test/must"
)

// manyNamespaces and manyServices are what manyManifest has: Services alone in their
// namespaces, and others in one namespace.
const manyNamespaces, manyServices = 300, 200

func manyManifest() string {
	var b strings.Builder
	for i := range manyNamespaces + manyServices {
		namespace, name := fmt.Sprintf("team-%03d", i), "api"
		if i >= manyNamespaces {
			namespace, name = "big", fmt.Sprintf("api-%03d", i-manyNamespaces)
		}
		ip := fmt.Sprintf("10.96.%d.%d", 1+i/200, 1+i%200)
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: %[2]s, namespace: %[1]s}
spec: {clusterIP: %[3]s, clusterIPs: [%[3]s], ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[2]s-1, namespace: %[1]s, labels: {kubernetes.io/service-name: %[2]s}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.11]}, {addresses: [10.244.1.12]}]
`, namespace, name, ip)
	}
	return b.String()
}

// The map of 504 Services in 302 namespaces has at most mostNodes nodes, also when a
// namespace is open, shows who is busy, and every Service is found.
func manyShown(t *testing.T, d *demo, b *browser) {
	const mostNodes = 130
	few := func() {
		t.Helper()
		if n := eval[int](b, `document.querySelectorAll(".board .node").length`); n > mostNodes {
			t.Errorf("the map has %d nodes, want at most %d", n, mostNodes)
		}
	}
	node := func(name string) string {
		return fmt.Sprintf(`[...document.querySelectorAll(".node.namespace, .node.namespaces")].find((n) => n.querySelector(".name").textContent === %q)`, name)
	}
	d.put(t, "many.yaml", manyManifest())
	t.Cleanup(func() { _ = os.Remove(filepath.Join(d.manifests, "many.yaml")) })
	b.visit("#/map")
	b.await("all Services are on the map", fmt.Sprintf(`[...document.querySelectorAll(".node.namespace .extra, .node.namespaces .extra")].reduce((n, e) => n + parseInt(e.textContent), 0) === %d`, manyNamespaces+manyServices+4))
	b.await("the busy namespace is", node("shop"))
	b.await("what flows is", `document.querySelectorAll(".links .link:not(.idle)").length > 0`)
	few()
	b.picture("many")

	// A namespace opens by keys.
	b.run(chromedp.Evaluate(node("shop")+`.focus()`, nil))
	b.press(kb.Enter)
	b.await("its Services are shown", `document.querySelectorAll(".node.service").length === 4`)
	few()

	// What the map leaves out is one step away.
	b.run(chromedp.Evaluate(`document.querySelector(".node.service").dispatchEvent(new PointerEvent("pointerenter"))`, nil))
	b.filter("service=team-299/api")
	b.await("the filter finds a Service", `document.querySelectorAll(".node.service").length === 1`)
	b.await("nothing is dimmed for the node under the pointer that has gone", `!document.querySelector(".board.focused")`)
	b.filter("namespace=big")
	b.await("the filter finds a namespace", node("big"))
	b.run(chromedp.Evaluate(node("big")+`.click()`, nil))
	b.await("it opens", `document.querySelectorAll(".node.service").length >= 10 && document.querySelector(".node.rest")`)
	few()
	for _, width := range []int64{390, 1440} {
		b.size(width, 900)
		b.await("nothing is cut off", fmt.Sprintf(`document.documentElement.scrollWidth <= %d`, width))
	}
	b.filter("")
	b.await("all are back", node("shop"))
	b.run(chromedp.Evaluate(`document.querySelector(".node.namespaces").click()`, nil))
	b.await("the table has the others", `document.querySelector("[aria-current]").textContent === "Services" && document.querySelectorAll("main tbody tr").length > 10`)
	must.OK(t, os.Remove(filepath.Join(d.manifests, "many.yaml")))
	b.visit("#/map")
	b.await("the demo's Services are alone again", `document.querySelectorAll(".node.service").length === 4`)
}
