package web

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPage looks at one demo with one browser: each part goes on where the last one
// left the page.
func TestPage(t *testing.T) {
	d := startDemo(t)
	b := open(t, d.url)
	for _, part := range []struct {
		name string
		test func(*testing.T, *demo, *browser)
	}{
		{"EachService", eachService}, {"Sums", sums}, {"Blame", blamed}, {"States", states}, {"NewConnection", newConnection}, {"Filter", filtering}, {"Address", addressed}, {"Story", retriedStory}, {"OpenStory", openStory}, {"UDPStory", udpStory}, {"NumberAgain", numberAgain}, {"LastPage", lastPage}, {"Networks", networks}, {"Charts", charted},
		{"Records", pausing}, {"Past", before}, {"Export", exported}, {"Explain", explained}, {"Keyboard", keyboard}, {"ManyServices", manyShown}, {"HostileNames", hostileNames}, {"Pictures", pictures}, {"Policy", policy}, {"Headers", headers},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			b.t = t
			part.test(t, d, b)
			b.quiet()
		}) {
			b.t = t
			b.picture("failed-" + part.name)
			return
		}
	}
	b.t = t
}

var services = []string{"shop/cart:http", "shop/search:http", "shop/soon:http", "shop/web:http"}

// The map and the table show each Service, and the map what flows.
func eachService(_ *testing.T, _ *demo, b *browser) {
	b.await("the map has each Service", `document.querySelectorAll(".node.service").length === 4`)
	b.await("clients are on the map", `document.querySelectorAll(".node.client").length >= 4`)
	b.await("something flows", `document.querySelectorAll(".links .link:not(.idle)").length > 8`)
	for _, pod := range []string{"ash", "cedar", "dogwood", "elm"} {
		b.await("the map has "+pod, fmt.Sprintf(`[...document.querySelectorAll(".node.endpoint .name")].some((n) => n.textContent === %q)`, pod))
	}
	b.visit("#/services")
	b.awaitRows(services...)
	b.visit("#/endpoints")
	b.await("the table has each endpoint", `document.querySelectorAll("main tbody tr").length >= 5 && /shop\/dogwood/.test(document.querySelector("main tbody").innerText)`)
}

// What the map shows of many clients with short connections, or of edges, adds up to the
// rate of all, to within 5 % in each frame.
func sums(t *testing.T, _ *demo, b *browser) {
	worst := evalLater[float64](b, `import("/js/store.js").then(({ blend }) => {
		const clients = new Map(), total = new Map();
		const row = (client, n) => ({ client, opened: n, ended: n, failed: 0, broken: 0, failed_attempts: 0, saved_attempts: 0, bytes_from_client: 0, bytes_from_endpoint: 0, open: 0, connecting: 0 });
		let worst = 0, next = 0;
		for (let frame = 0; frame < 30; frame++) {
			const rows = [row("steady", 20)];
			for (let i = 0; i < 120; i++) rows.push(row("c" + next++, 1)); // each comes once
			blend(clients, rows, (r) => r.client);
			blend(total, [row("", 140)], () => "");
			const sum = [...clients.values()].reduce((n, r) => n + r.opened, 0);
			worst = Math.max(worst, Math.abs(sum / total.get("").opened - 1));
		}
		return worst;
	})`)
	if worst > 0.05 {
		t.Errorf("clients differ from the rate of all by %.0f %%", 100*worst)
	}
}

// An endpoint that resets connections is red on the map; one whose attempts others made
// good is not.
func blamed(t *testing.T, _ *demo, b *browser) {
	got := evalLater[string](b, `Promise.all([import("/js/store.js"), import("/js/mapmodel.js")]).then(([{ store, serviceKey, edgeKey }, { model, badness }]) => {
		const kept = { services: store.services, edges: store.edges };
		const endpoints = ["resets", "refuses", "dead", "good"].map((name, i) => ({ endpoint: "10.9.0." + i + ":80", pod: "t/" + name, ready: true }));
		const row = (more) => ({ opened: 10, open: 0, bytes_from_client: 0, bytes_from_endpoint: 0, failed: 0, broken: 0, failed_attempts: 0, saved_attempts: 0, ...more });
		const rows = [row({ failed: 10, broken: 10 }), row({ failed_attempts: 5, saved_attempts: 5 }), row({ failed: 10, failed_attempts: 20 }), row({})];
		store.services = [{ service: "t/web", protocol: "TCP", endpoints }];
		store.edges = new Map(rows.map((r, i) => [edgeKey("t/web", "TCP", endpoints[i].endpoint), r]));
		const out = model(new Set()).endpoints.map((n) => n.label + " " + badness(n.sums)).join(", ");
		Object.assign(store, kept);
		return out;
	})`)
	if want := "resets 3, refuses 1, dead 3, good 0"; got != want {
		t.Errorf("the map blames %s; want %s", got, want)
	}
}

// The table of endpoints says what keeps new connections off one.
func states(t *testing.T, _ *demo, b *browser) {
	got := module[string](b, "/js/tables.js", `({ stateOf }) => [
		{ ready: true, open: 3 }, { ready: true, ejected: { why: "resets" } }, { ready: true, ejected: { why: "failed attempts", tried: true } },
		{ ready: true, share: 0.35, full: true }, { ready: false, full: true }, { terminating: true, serving: true, full: true },
	].map((e) => stateOf({ endpoint: "10.9.0.1:80", ...e })).join("; ")`)
	if want := "ready; ejected after resets; tried again after failed attempts; starts slowly, 35 %, full; not ready; terminating, serving"; got != want {
		t.Errorf("the table says %s; want %s", got, want)
	}
}

// A connection appears within a second.
func newConnection(t *testing.T, d *demo, b *browser) {
	b.visit("#/connections")
	b.await("the demo's connections are listed", `document.querySelectorAll("main tbody tr").length > 1`)
	within(t, time.Second, "from the connection to the page", func() time.Duration {
		h := d.hold(t, "10.96.0.20:80")
		defer h.end()
		b.await(h.from+" is listed", fmt.Sprintf(`[...document.querySelectorAll("main tbody tr")].some((r) => r.cells[0].innerText === %q)`, h.from))
		return time.Since(h.opened)
	})
}

// The filter narrows all views, and its error points at the place.
func filtering(t *testing.T, d *demo, b *browser) {
	h := d.hold(t, "10.96.0.10:80")
	defer h.end()
	b.filter("client=" + h.from)
	b.awaitRows(h.from)
	b.visit("#/services?f=service%3Dshop%2Fcart")
	b.awaitRows(services[0])
	b.visit("#/map?f=service%3Dshop%2Fcart")
	b.await("one Service is left on the map", `document.querySelectorAll(".node.service").length === 1`)
	b.filter("service=cart atempts>1")
	b.await("the error is told", `/attempts/.test(document.getElementById("filter-error").textContent)`)
	check.Equalf(t, eval[string](b, `document.querySelector(".marks .mark").textContent`), "atempts", "the place that is marked")
	b.filter("")
	b.await("all Services are back", `document.querySelectorAll(".node.service").length === 4 && document.getElementById("filter-error").hidden`)
}

// An address is one step of the browser's history, also where the page writes it in
// another way, and Back leaves it.
func addressed(t *testing.T, _ *demo, b *browser) {
	b.visit("#/services")
	b.await("the Services are shown", `document.querySelectorAll("main tbody tr").length === 4`)
	before := eval[int](b, `history.length`)
	b.visit("#/endpoints?f=service%3Dshop%2Fcart")
	b.await("the endpoints of one Service are left", `document.querySelector("main [aria-label=Endpoints]") && document.getElementById("filter-input").value === "service=shop/cart"`)
	if after := eval[int](b, `history.length`); after != before+1 {
		t.Errorf("the address took %d steps, want 1", after-before)
	}
	b.run(chromedp.Evaluate(`history.back()`, nil))
	b.await("Back shows all Services", `location.hash === "#/services" && document.querySelectorAll("main tbody tr").length === 4`)
	for address, shown := range map[string]string{"#/nowhere": "#/map", "#/records?f=atempts%3E1": "#/records", "#/services?f=service%3Dshop/cart": "#/services?f=service%3Dshop%2Fcart"} {
		b.run(chromedp.Evaluate(fmt.Sprintf("void (location.hash = %q)", address), nil))
		b.await(address+" is "+shown, fmt.Sprintf("location.hash === %q", shown))
		b.run(chromedp.Evaluate(`history.back()`, nil))
		b.await("Back leaves "+address, `location.hash === "#/services"`)
	}
	b.filter("")
	// A key while the proxy is asked for the filter of an address is what counts.
	b.run(chromedp.Evaluate(`addEventListener("hashchange", () => dispatchEvent(new KeyboardEvent("keydown", { key: "3" })), { once: true }); void (location.hash = "#/records?f=attempts%3E1")`, nil))
	b.await("3 is the endpoints", `document.querySelector("[aria-current]").textContent === "Endpoints"`)
	await := func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }
	b.run(chromedp.Evaluate(`fetch("/v1/connections?limit=0&filter=attempts%3E1").then((r) => r.text())`, nil, await))
	check.Equalf(t, eval[string](b, `document.querySelector("[aria-current]").textContent + document.getElementById("filter-input").value`), "Endpoints", "the page shows")
}

// The story of a connection that met the dead pod names it.
func retriedStory(t *testing.T, d *demo, b *browser) {
	// Not one that another endpoint was late for, or whose client had data left to read.
	b.visit("#/records?f=" + url.PathEscape("attempts=2 error=refused tried=10.244.1.14 end=client_fin"))
	b.await("a connection was retried", `document.querySelectorAll("main tbody tr").length > 0`)
	b.run(chromedp.Evaluate(`document.querySelector("main tbody tr").focus()`, nil))
	b.press(kb.Enter)
	b.await("its story is told", `document.querySelectorAll("#panel .attempts li").length === 2 && document.querySelector("#panel .candidates")`)
	story := eval[string](b, `document.getElementById("panel").innerText`)
	for _, want := range []string{"shop/dogwood", "refused", "answered", "shop/search:http", "an endpoint answered", "first byte", "closed by the client", "Who ended or delayed it", "Why this endpoint", "3 candidates", "tried: refused"} {
		if !strings.Contains(story, want) {
			t.Errorf("the story lacks %q:\n%s", want, story)
		}
	}
	// What explains it is the Service of now, which the story says once it is another.
	before, err := os.ReadFile(filepath.Join(d.manifests, "search.yaml"))
	must.OK(t, err)
	t.Cleanup(func() { d.put(t, "search.yaml", string(before)) })
	d.put(t, "search.yaml", strings.Replace(string(before), "  namespace: shop\n", "  namespace: shop\n  annotations: {sluice.dev/idle-timeout: 1h}\n", 1))
	b.await("the story says that its Service has changed since", `/have changed since/.test(document.querySelector("#panel .outdated")?.textContent)`)
	b.picture("story")
	b.filter("")
}

// The story of an open connection says whom it waits for, and what TCP says of both sides.
func openStory(t *testing.T, d *demo, b *browser) {
	h := d.hold(t, "10.96.0.20:80")
	defer h.end()
	b.visit("#/connections?f=" + url.PathEscape("client="+h.from))
	b.awaitRows(h.from)
	b.run(chromedp.Evaluate(`document.querySelector("main tbody tr").focus()`, nil))
	b.press(kb.Enter)
	b.await("its story says whom it waits for", `/^The client: it has /.test(document.querySelector("#panel .verdict .lead")?.textContent)`)
	for _, side := range []string{"To the client: ", "To the endpoint: "} {
		b.await(side, fmt.Sprintf(`[...document.querySelectorAll("#panel .verdict .hint")].some((p) => p.textContent.startsWith(%q) && /segments sent again/.test(p.textContent))`, side))
	}
	h.end()
	b.await("it has ended", `document.querySelector("#panel .verdict h3")?.textContent === "Who ended or delayed it"`)
	b.filter("")
}

// The story of a UDP session names its endpoint, although no answer is waited for.
func udpStory(t *testing.T, _ *demo, b *browser) {
	const session = `{ id: 1e9, time: "2026-06-01T12:00:00Z", protocol: "UDP", client: "10.244.0.11:4000", vip: "10.96.0.2:53", vip_kind: "ClusterIP", endpoint: "10.244.1.9:53", affinity: "none",
		duration_us: 2000, bytes_from_client: 31, bytes_from_endpoint: 47, `
	for rest, want := range map[string]string{
		`attempts: 1, end: "idle" }`:                           "One attempt✓ chosen",
		`attempts: 1, first_byte_us: 1000, end: "responses" }`: "One attempt✓ answered",
		`attempts: 2, failed_attempts: [{ endpoint: "10.244.1.8:53", error: "refused", us: 9 }], first_byte_us: 1000, end: "idle" }`: "2 attempts✕ refused ✓ answered",
		`attempts: 1, failed_attempts: [{ endpoint: "10.244.1.8:53", error: "refused", us: 9 }], end: "endpoint_gone" }`:             "One attempt✕ refused",
	} {
		var got string
		b.run(chromedp.Evaluate(`import("/js/story.js").then(({ story }) => {
			const { root, stop } = story({ id: 1e9, seen: `+session+rest+` });
			stop();
			const of = (s) => [...root.querySelectorAll(s)].map((e) => e.textContent);
			return of("section:nth-of-type(1) h3")[0] + of(".attempts .said, .attempts .waiting").join(" ");
		})`, &got, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
		if got != want {
			t.Errorf("%s: %q, want %q", rest, got, want)
		}
	}
}

// module returns what a function makes of a module of the page.
func module[T any](b *browser, path, function string) (value T) {
	b.t.Helper()
	b.run(chromedp.Evaluate(fmt.Sprintf("import(%q).then(%s)", path, function), &value, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	return value
}

// A proxy that starts again gives numbers again: the record that the page has of the last
// connection with a number is not the story of the next one.
func numberAgain(t *testing.T, _ *demo, b *browser) {
	const one = `({ id: 2e9, protocol: "TCP", client: "10.244.0.11:4000", vip: "10.96.0.20:80", vip_kind: "ClusterIP", affinity: "none", attempts: 1, connect_us: 1,
		bytes_from_client: 31, bytes_from_endpoint: 47, duration_us: 2000, ...more })`
	const stories = `async ({ story }) => {
		const { keep } = await import("/js/records.js"), { note, samples } = await import("/js/samples.js");
		const one = (more) => ` + one + `;
		const before = one({ time: "2026-06-01T12:00:00Z", end: "client_fin", endpoint: "10.244.1.8:80" });
		keep(before);
		note(before);
		const now = one({ time: "2026-06-01T13:00:00Z", end: "idle", endpoint: "10.244.1.9:80" });
		const told = [now, before].map((seen) => {
			const { root, stop } = story({ id: 2e9, seen });
			stop();
			return root.querySelector(".attempts .code").textContent;
		});
		return told.join(" ") + " " + samples(now).length + samples(before).length;
	}`
	if got, want := module[string](b, "/js/story.js", stories), "10.244.1.9:80 10.244.1.8:80 01"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// When fewer connections are left than there were pages, the last page is asked for.
func lastPage(t *testing.T, _ *demo, b *browser) {
	const turned = `({ table }) => {
		let matched = 120;
		const asked = [];
		const answer = (first, page) => t.set([...Array(Math.max(0, Math.min(page, matched - first)))].map((_, i) => ({ id: first + i })), matched);
		const t = table({ label: "", columns: [{ key: "id", label: "", value: (x) => String(x.id) }], key: (x) => String(x.id), sort: { key: "id" }, empty: () => "none",
			open() {}, query: (by, first, page) => (asked.push(first), answer(first, page)) });
		answer(0, 50);
		const next = [...t.root.querySelectorAll("button")].at(-1);
		next.click();
		next.click();
		matched = 60;
		answer(100, 50);
		return asked.join(" ") + ": " + t.root.querySelector(".where").textContent;
	}`
	if got, want := module[string](b, "/js/table.js", turned), "50 100 50: 51 to 60 of 60"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The network of many clients is a filter that finds them.
func networks(t *testing.T, _ *demo, b *browser) {
	for address, want := range map[string]string{
		"10.244.0.11": "10.244.0.0/24", "fd00:1::2": "fd00:1::/64", "::1": "::/64", "fd00:1:2:3:4:5:6:7": "fd00:1:2:3::/64",
		"fd00::1:a8bb:ccff:fe00:1": "fd00:0:0:1::/64", "2001:db8:0:1::5": "2001:db8:0:1::/64", "2001:db8::5:6:7:8": "2001:db8::/64", "1::": "1::/64",
	} {
		if got := module[string](b, "/js/mapmodel.js", fmt.Sprintf("({ network }) => network(%q)", address)); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

// oneManifest is a Service that nobody asks.
const oneManifest = `apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop-later}
spec: {clusterIP: 10.96.9.9, ports: [{name: http, port: 80}]}
`

// What is chosen has charts of what the proxy has kept.
func charted(t *testing.T, _ *demo, b *browser) {
	drawn := module[string](b, "/js/chart.js", `({ chart }) => {
		const { root, draw } = chart({ title: "t", least: 1, show: String, lines: [{ name: "", class: "flow", get: (p) => p.n }] });
		draw([{ age: 45, ms: 0, n: 1 }, { age: 0, ms: 45000, n: 1 }]);
		return root.querySelector("path.line").getAttribute("d").split(" ")[0] + " " + root.querySelector(".axis span").textContent;
	}`)
	check.Equalf(t, drawn, "M80.0 60 s ago", "where the first minute's chart begins, of 320")
	b.visit("#/map?sel=service%3Ashop%2Fweb%3Ahttp%20TCP")
	b.await("one is of open connections", `[...document.querySelectorAll("#panel .chart .title")].some((t) => t.textContent === "Open connections")`)
	b.await("the Service's charts are drawn", `[...document.querySelectorAll("#panel .chart")].length === 6 && /L/.test(document.querySelector("#panel .chart path.line.flow").getAttribute("d"))`)
	b.await("they say what they show", `/New connections, the last [0-9]+ [a-z]+: now [0-9.]+\/s/.test(document.querySelector("#panel .plot").getAttribute("aria-label"))`)
	b.await("the Service's pods are listed", `/cedar/.test(document.querySelector("#panel .listing").innerText)`)
}

// Records come, and stop while they are paused.
func pausing(t *testing.T, d *demo, b *browser) {
	b.visit("#/records")
	b.await("records come", `document.querySelectorAll("main tbody tr").length > 3`)
	b.run(chromedp.Evaluate(`window.changes = 0, window.observer = new MutationObserver((list) => changes += list.length), undefined`, nil))
	b.press("p")
	b.await("it says so", `document.getElementById("state").textContent === "paused" && document.getElementById("pause").textContent === "Go on"`)
	b.run(chromedp.Evaluate(`observer.observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true }), window.since = performance.now(), undefined`, nil))
	h := d.hold(t, "10.96.0.20:80")
	h.end()
	shown := fmt.Sprintf(`[...document.querySelectorAll("main tbody tr")].some((r) => r.cells[1].innerText === %q)`, h.from)
	asked := evalLater[int](b, `new Promise((done) => setTimeout(() => done(performance.getEntriesByType("resource").filter((r) => r.startTime > since).length), 1500))`)
	if changes := eval[int](b, `changes`); changes > 0 || asked > 0 || eval[bool](b, shown) {
		t.Errorf("paused, the page has changed %d times and asked %d times", changes, asked)
	}
	b.run(chromedp.Evaluate(`observer.disconnect()`, nil))
	b.press("p")
	b.await("what ended meanwhile is shown", shown)
	b.await("it goes on", `document.getElementById("state").textContent === "ready" && document.getElementById("pause").textContent === "Pause"`)
}

// The records begin with those of before, also on a page that was loaded after; the story's
// link holds there too.
func before(t *testing.T, d *demo, b *browser) {
	h := d.hold(t, "10.96.0.20:80")
	h.end()
	client := `[...document.querySelectorAll("main tbody tr")].map((r) => r.cells[1].innerText).join() === ` + fmt.Sprintf("%q", h.from)
	b.visit("#/records?f=" + url.PathEscape("client="+h.from))
	b.await("its record is shown", client)
	b.run(chromedp.Reload())
	b.await("its record is shown after a reload", client)
	b.run(chromedp.Evaluate(`document.querySelector("main tbody tr").click()`, nil))
	b.await("the address has its time", `/sel=connection%3A[0-9]+%4020/.test(location.hash)`)
	b.run(chromedp.Reload())
	b.await("the link tells the story", fmt.Sprintf(`document.querySelector("#panel .facts")?.innerText.includes(%q) && document.querySelector("#panel .times li:last-child")`, h.from))
	link := eval[string](b, `location.hash`)
	b.visit(strings.Replace(link, "%4020", "%4019", 1))
	b.await("the number of another connection is not its story", `/no longer has its record/.test(document.querySelector("#panel .story")?.textContent)`)
	b.press(kb.Escape)
	b.filter("")
}

// The page saves the connections that the filter selects.
func exported(t *testing.T, d *demo, b *browser) {
	h := d.hold(t, "10.96.0.20:80")
	defer h.end()
	// In place of the browser's own saving: the file's name and its content.
	b.run(chromedp.Evaluate(`window.saved = {};
		URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved.text = text; }); return "#/connections"; };
		HTMLAnchorElement.prototype.click = function () { window.saved.name = this.download; };`, nil))
	save := func(label string) string {
		b.run(chromedp.Evaluate(fmt.Sprintf(`window.saved = {}; [...document.querySelectorAll(".exports button")].find((n) => n.textContent === %q).dispatchEvent(new MouseEvent("click"))`, "Save "+label), nil))
		b.await(label+" is saved", `window.saved.text !== undefined`)
		return eval[string](b, `window.saved.name + "\n" + window.saved.text`)
	}
	b.visit("#/connections?f=" + url.PathEscape("client="+h.from))
	b.awaitRows(h.from)
	rows := strings.Split(strings.TrimSpace(save("CSV")), "\n")
	if len(rows) != 3 || rows[0] != "sluice-connections.csv" || !strings.HasPrefix(rows[1], "time,id,state,") || !strings.Contains(rows[2], ","+h.from+",") {
		t.Errorf("%q", rows)
	}
	b.filter("")
	b.visit("#/records?f=end%3Dclient_fin")
	b.await("records are shown", `document.querySelectorAll("main tbody tr").length > 0`)
	if saved := save("JSON"); !strings.HasPrefix(saved, "sluice-records.json\n{\"time\":") || !strings.Contains(saved, `"end":"client_fin"}`) {
		t.Errorf("%.300s", saved)
	}
	b.filter("")
	b.run(chromedp.Reload())
}

func explained(_ *testing.T, _ *demo, b *browser) {
	b.visit("#/explain")
	b.await("the form is there", `document.getElementById("explain-from")`)
	b.run(chromedp.SendKeys("#explain-from", "10.244.0.11"), chromedp.SendKeys("#explain-to", "10.96.0.30:80"))
	b.press(kb.Enter)
	b.await("the reasons are there", `/Accepted/.test(document.querySelector(".result").innerText) && /dogwood/.test(document.querySelector(".result").innerText)`)
	b.run(chromedp.Reload())
	b.await("its address asks again", `/Accepted/.test(document.querySelector(".result")?.innerText) && document.getElementById("explain-from").value === "10.244.0.11"`)
	b.run(chromedp.SetValue("#explain-to", "nonsense"), chromedp.Click(".explain button"))
	b.await("an error is told", `document.querySelector(".result .wrong")`)
}

// Everything is reached by keys alone.
func keyboard(t *testing.T, _ *demo, b *browser) {
	b.run(chromedp.Evaluate(`document.activeElement.blur()`, nil))
	b.press(kb.Escape, "2")
	b.await("2 is the Services", `document.querySelector("[aria-current]").textContent === "Services" && document.querySelectorAll("main tbody tr").length === 4`)
	for range 60 {
		b.press(kb.Tab)
		if eval[bool](b, `document.activeElement.matches("main tbody tr")`) {
			break
		}
	}
	b.press(kb.ArrowDown, kb.Enter)
	b.await("the second Service is chosen", `document.querySelector("#panel h2").textContent === "shop/search:http"`)
	b.press(kb.Escape)
	b.await("Escape closes it", `document.querySelector("#panel h2").textContent === "node-a"`)
	if !eval[bool](b, `document.activeElement.matches("main tbody tr")`) {
		t.Error("the focus has not stayed")
	}
	b.press("1")
	b.await("1 is the map", `document.querySelectorAll(".node.service").length === 4`)
	b.run(chromedp.Focus(".node.service"))
	b.press(kb.ArrowRight, kb.Enter)
	b.await("a pod is chosen", `document.querySelector("#panel .kind").textContent === "Pod"`)
	b.press("?")
	b.await("? lists the keys", `document.querySelector("dialog").open`)
	b.press("5", kb.Escape)
	b.await("Escape closes the list", `!document.querySelector("dialog").open`)
	if got := eval[string](b, `document.querySelector("[aria-current]").textContent + " " + document.querySelector("#panel .kind").textContent`); got != "Map Pod" {
		t.Errorf("behind the list of keys the page has become %s", got)
	}
	b.press(kb.Escape)
	b.visit("#/services?f=service%3Dshop%2Fcart")
	b.awaitRows(services[0])
	b.run(chromedp.Focus(".skip"))
	b.press(kb.Enter)
	b.await("the link skips to the view", `document.activeElement.id === "view"`)
	if got := eval[string](b, `location.hash`); got != "#/services?f=service%3Dshop%2Fcart" {
		t.Errorf("the link skips to %s", got)
	}
	b.filter("")
}

// hostile is a Service whose names are markup wherever an API server allows it.
const hostile = `apiVersion: v1
kind: Service
metadata:
  name: hostile
  namespace: shop
  annotations: {example.com/name: "<img src=x onerror='window.hostile=1'>"}
spec:
  clusterIP: 10.96.0.50
  clusterIPs: [10.96.0.50]
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: hostile-1
  namespace: shop
  labels: {kubernetes.io/service-name: hostile}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- addresses: ["10.244.1.13"]
  zone: "<img src=x onerror='window.hostile=2'>"
  targetRef: {kind: Pod, namespace: "<script>window.hostile=3</script>", name: "<img src=x onerror='window.hostile=4'>"}
`

// Names that are markup are shown as they are, and run nothing.
func hostileNames(t *testing.T, d *demo, b *browser) {
	const name = "<img src=x onerror='window.hostile=4'>"
	d.put(t, "hostile.yaml", hostile)
	b.visit("#/map?f=service%3Dshop%2Fhostile")
	shown := func(where string) string {
		return fmt.Sprintf(`(document.querySelector(%q)?.textContent ?? "").includes(%q)`, where, name)
	}
	b.await("the map shows the name", shown("main"))
	b.visit("#/endpoints?f=service%3Dshop%2Fhostile")
	b.await("the table shows it", shown("main"))
	h := d.hold(t, "10.96.0.50:80")
	defer h.end()
	b.visit("#/connections?f=service%3Dshop%2Fhostile")
	b.await("its connection is listed", shown("main tbody"))
	b.run(chromedp.Click("main tbody tr"))
	b.await("the story shows it", shown("#panel .attempts"))
	h.end()
	b.await("the end is told", `/closed by/.test(document.getElementById("panel").innerText)`)
	// What the address of the page says is text, too.
	b.visit("#/map?f=" + "%3Cimg%20src%3Dx%20onerror%3Dwindow.hostile%3D5%3E&sel=endpoint%3A%3Cimg%20src%3Dx%20onerror%3Dwindow.hostile%3D6%3E")
	b.await("the error is told", `!document.getElementById("filter-error").hidden`)
	b.await("the panel names what is chosen", `/<img/.test(document.querySelector("#panel h2").textContent)`)
	if n := eval[int](b, `document.querySelectorAll("img, iframe, body script:not([src])").length`); n > 0 {
		t.Errorf("%d elements were made of names", n)
	}
	if eval[bool](b, `"hostile" in window`) {
		t.Error("a name has run")
	}
	b.press(kb.Escape)
	b.filter("")
	b.visit("#/map")
}

// pictures leaves pictures in the output.
func pictures(_ *testing.T, _ *demo, b *browser) {
	b.await("something flows", `document.querySelectorAll(".links .link:not(.idle)").length > 8`)
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		for name, size := range map[string][2]int64{"wide": {1440, 900}, "narrow": {390, 844}} {
			b.size(size[0], size[1])
			b.await("nothing is cut off", fmt.Sprintf(`document.documentElement.scrollWidth <= %d`, size[0]))
			b.picture(scheme + "-" + name)
		}
	}
	b.size(320, 640) // the smallest phones
	for _, view := range []string{"services", "endpoints", "connections", "records", "explain", "map"} {
		b.visit("#/" + view)
		b.await("nothing of "+view+" is cut off", `document.querySelector("main > *") && document.documentElement.scrollWidth <= 320`)
	}
	b.size(1440, 900)
}

// policy shows that what the other parts rely on is there: inline scripts do not run,
// markup is not made of text, and the browser's complaint is heard.
func policy(t *testing.T, _ *demo, b *browser) {
	b.quiet()
	got := eval[string](b, `(() => {
		window.refused = 0;
		addEventListener("securitypolicyviolation", () => { window.refused++; });
		const script = document.createElement("script");
		try { script.textContent = "window.hostile = 7"; } catch {}
		document.body.append(script);
		const a = document.createElement("div");
		try { a.setAttribute("onclick", "window.hostile = 8"); a.click(); } catch {}
		let said = "";
		try { a.innerHTML = "<img src=x onerror='window.hostile=9'>"; } catch (e) { said = e.name; }
		return said + ("hostile" in window);
	})()`)
	check.Equalf(t, got, "TypeErrorfalse", "markup and inline scripts")
	// The browser tells of refusals when it has time, and all of them belong here.
	b.await("the policy has refused three things", `window.refused === 3`)
	b.await("nothing runs", `!("hostile" in window)`)
	const last = "that was all"
	b.run(chromedp.Evaluate(fmt.Sprintf("console.error(%q)", last), nil))
	wait.For(t, "what the browser says last is heard", patience, func() error { return b.hasHeard(last) })
	if n := len(b.complaints()); n < 1+3 {
		t.Errorf("the browser has complained %d times, want at least 3", n-1)
	}
}

// headers shows that the demo's page has the same guard as all.
func headers(t *testing.T, d *demo, _ *browser) {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.url, http.NoBody)
	must.OK(t, err)
	r.Host = "attacker.example"
	resp, err := http.DefaultClient.Do(r)
	must.OK(t, err)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("by another name: %s", resp.Status)
	}
}
