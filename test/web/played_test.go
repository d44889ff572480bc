package web

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/web"
)

// played is a page whose proxies are played.
type played struct {
	url   string
	nodes []api.ProxyNode // of the status: the page is of several nodes

	play   chan struct{} // closed when the frames may come
	frames func(by, node string) []*api.Frame
	begin  sync.Once
}

func newPlayed(t *testing.T, p *played) *played {
	t.Helper()
	p.play = make(chan struct{})
	h, err := web.New(web.Options{API: http.HandlerFunc(p.answer)})
	must.OK(t, err)
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	p.url = s.URL + "/"
	return p
}

// playedServices have names of all lengths that Kubernetes allows.
var playedServices = []string{"shop/a:http", "shop/b:http", strings.Repeat("n", 63) + "/" + strings.Repeat("s", 63) + ":" + strings.Repeat("p", 15)}

func (p *played) answer(w http.ResponseWriter, r *http.Request) {
	node := r.URL.Query().Get("proxy_node")
	send := func(v any) {
		_ = json.NewEncoder(w).Encode(v)
		_ = http.NewResponseController(w).Flush()
	}
	c := api.Connection{ID: 7, Time: time.Unix(1.8e9, 0).UTC(), State: "open", Protocol: "TCP", Client: "10.1.0.1:4000", VIP: "10.96.0.1:80", VIPKind: "ClusterIP", Service: playedServices[2], Endpoint: "10.244.0.1:80", Attempts: 1}
	switch path := r.URL.Path; {
	case path == api.PathStatus:
		send(&api.Status{Version: api.Version{Node: max(node, "node")}, Ready: true, Nodes: p.nodes})
	case path == api.PathServices:
		all := &api.Services{Matched: len(playedServices)}
		for i, s := range playedServices {
			all.Services = append(all.Services, api.Service{Service: s, Protocol: "TCP", Port: 80, Endpoints: []api.Endpoint{
				{Endpoint: fmt.Sprintf("10.244.%d.1:80", i), Ready: true}, {Endpoint: fmt.Sprintf("10.244.%d.2:80", i), Ready: true},
			}})
		}
		send(all)
	case path == api.PathHistory && p.nodes != nil && node == "":
		w.WriteHeader(http.StatusBadRequest) // of one node alone
	case path == api.PathHistory:
		send(map[string]any{"began": time.Unix(1.8e9, 0), "times": []int{}, "series": []int{}})
	case path == api.PathConnections:
		if node == "" && p.nodes != nil {
			c.ProxyNode = p.nodes[0].Node
		}
		send(&api.Connections{Open: 1, Matched: 1, Connections: []api.Connection{c}})
	case strings.HasPrefix(path, api.PathConnections+"/") && p.nodes != nil && node == "":
		w.WriteHeader(http.StatusBadRequest)
	case strings.HasPrefix(path, api.PathConnections+"/"):
		send(&c)
	case path == api.PathRates:
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-p.play:
		case <-r.Context().Done():
			return
		}
		for _, f := range p.frames(r.URL.Query().Get("by"), node) {
			send(f)
		}
		<-r.Context().Done()
	case path == api.PathFailures:
		send(&api.Failures{Failures: []api.Failure{{Time: c.Time, Service: r.URL.Query().Get("service"), Client: "10.1.0.9", VIP: c.VIP, Error: "no_endpoints", Packets: 12}}})
	case path == api.PathTap:
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	default:
		send(map[string]any{})
	}
}

// TestNumbers plays 30 seconds of 140 new connections a second, most of them of clients that
// come once: in each frame edges, clients and Services add up to what the page calls New,
// and so do the map's nodes and lines at the end.
func TestNumbers(t *testing.T) {
	const frames, each, tolerance = 30, 140, 0.05
	client := 0
	p := newPlayed(t, &played{frames: func(by, _ string) []*api.Frame {
		var all []*api.Frame
		for n := range frames {
			f := &api.Frame{Time: time.Unix(int64(1.8e9+n), 0), Seconds: 1, Total: api.Rates{Opened: each, Ended: each}}
			for i := range each {
				s := i % len(playedServices)
				row := api.Rates{Service: playedServices[s], Protocol: "TCP", Opened: 1, Ended: 1}
				if by == "client,service" {
					row.Client = "10.9.9.9"
					if i%7 > 0 { // the others come once
						client++
						row.Client = fmt.Sprintf("10.%d.%d.%d", 10+client>>16, client>>8&255, client&255)
					}
				} else {
					row.Endpoint = fmt.Sprintf("10.244.%d.%d:80", s, 1+(i+n)%2)
				}
				f.Rows = append(f.Rows, row)
			}
			all = append(all, merged(f))
		}
		return all
	}})
	b := open(t, p.url)
	b.await("the map is there", `document.querySelectorAll(".node.service").length === 3`)
	b.run(chromedp.Evaluate(`window.sums = { edges: [], services: [], clients: [], now: [] };
		import("/js/store.js").then(({ on, store }) => {
			const sum = (map) => [...map.values()].reduce((n, r) => n + r.opened, 0);
			on("frame", () => { sums.now.push(store.total.opened); sums.edges.push(sum(store.edges)); sums.services.push(sum(store.byService)); });
			on("clients", () => sums.clients.push(sum(store.clients)));
			window.hooked = true;
		}); undefined`, nil))
	b.await("the numbers are taken down", `window.hooked === true`)
	close(p.play)
	b.await("all frames have come", fmt.Sprintf(`sums.now.length === %d && sums.clients.length === %[1]d`, frames))
	got := eval[map[string][]float64](b, `sums`)
	for i, now := range got["now"] {
		for _, what := range []string{"edges", "services", "clients"} {
			if math.Abs(got[what][i]/now-1) > tolerance || math.Abs(now/each-1) > tolerance {
				t.Errorf("frame %d: %s add up to %.1f, New is %.1f of %d", i, what, got[what][i], now, each)
			}
		}
	}
	drawn := evalLater[map[string]float64](b, `import("/js/mapmodel.js").then(({ model }) => {
		const m = model(new Set()), sum = (list) => list.reduce((n, x) => n + (x.sums ?? x).opened, 0);
		return { clients: sum(m.clients), services: sum(m.groups.flatMap((g) => g.nodes)), endpoints: sum(m.endpoints),
			"lines of clients": sum(m.links.filter((l) => l.from.startsWith("c "))), "lines of endpoints": sum(m.links.filter((l) => !l.from.startsWith("c "))) };
	})`)
	for what, n := range drawn {
		if math.Abs(n/each-1) > tolerance {
			t.Errorf("the map's %s add up to %.1f of %d", what, n, each)
		}
	}
	shown := eval[string](b, `[...document.querySelectorAll("#strip .cell")].find((c) => c.querySelector(".label").textContent.startsWith("New")).querySelector(".value").textContent`)
	if n, err := strconv.ParseFloat(shown, 64); err != nil || math.Abs(n/each-1) > tolerance {
		t.Errorf("the page shows %q as New", shown)
	}
}

// TestWidths: no tab is cut, on phones either, and the longest names push no column of a table
// out of a screen.
func TestWidths(t *testing.T) {
	p := newPlayed(t, &played{frames: func(string, string) []*api.Frame {
		row := api.Rates{Service: playedServices[2], Protocol: "TCP", Endpoint: "10.244.2.1:80", Opened: 1234, Open: 123456, BytesFromClient: 1e9, Failed: 12, FailedAttempts: 12, ConnectP99US: 123456, FirstP99US: 1234567, DurationP50US: 1234567, DurationP99US: 123456789}
		return []*api.Frame{{Time: time.Now(), Seconds: 1, Total: row, Rows: []api.Rates{row}, Groups: 1}}
	}})
	close(p.play)
	b := open(t, p.url)
	for _, width := range []int64{1920, 1600, 1440, 390, 320} {
		b.size(width, 844)
		b.await("no tab is cut", `[...document.querySelectorAll("#tabs a")].every((a) => { const r = a.getBoundingClientRect(); return r.width > 0 && r.left >= 0 && r.right <= innerWidth; })`)
		for _, view := range []string{"services", "endpoints", "connections"} {
			if width < 1000 {
				continue // tables scroll
			}
			b.visit("#/" + view)
			b.await("each column of "+view+" is seen", `(() => {
				const cells = [...document.querySelectorAll("main th")].filter((c) => c.offsetParent);
				return cells.length >= 3 && document.querySelectorAll("main tbody tr").length > 0 && cells.every((c) => c.getBoundingClientRect().right <= innerWidth);
			})()`)
		}
	}
}

// merged has each key once, as a proxy's frame.
func merged(f *api.Frame) *api.Frame {
	at := make(map[string]int)
	rows := f.Rows
	f.Rows = nil
	for i := range rows {
		k := rows[i].Service + rows[i].Endpoint + rows[i].Client
		if n, ok := at[k]; ok {
			f.Rows[n].Opened += rows[i].Opened
			f.Rows[n].Ended += rows[i].Ended
			continue
		}
		at[k] = len(f.Rows)
		f.Rows = append(f.Rows, rows[i])
	}
	return f
}

// TestNodes looks at the page of several nodes: it names those that do not answer, shows all
// together or the one that is chosen, and its address says which.
func TestNodes(t *testing.T) {
	p := newPlayed(t, &played{
		nodes: []api.ProxyNode{{Node: "node-a"}, {Node: "node-b"}, {Node: "node-c", Trouble: "pod sluice-c: no answer in 10s"}},
		frames: func(_, node string) []*api.Frame {
			return []*api.Frame{{Time: time.Now(), Seconds: 1, Rows: []api.Rates{}, Total: api.Rates{Open: map[string]int{"": 30, "node-a": 10, "node-b": 20}[node]}}}
		},
	})
	close(p.play)
	b := open(t, p.url)
	const shown = `document.querySelector("#strip .value").textContent === %q && document.getElementById("nodes").value === %q`
	b.await("all nodes are shown together", fmt.Sprintf(shown, "30", ""))
	b.await("the one that does not answer is named", `document.getElementById("state").textContent === "no answer of node-c" && /node-c/.test(document.querySelector("#panel .listing").innerText) && /no answer in 10s/.test(document.getElementById("panel").innerText)`)
	if got := eval[string](b, `[...document.getElementById("nodes").options].map((o) => o.text).join(", ")`); got != "All 3 nodes, node-a, node-b, node-c" {
		t.Errorf("the nodes to choose from: %s", got)
	}
	choose := func(node string) {
		b.run(chromedp.Evaluate(fmt.Sprintf(`{ const s = document.getElementById("nodes"); s.value = %q; s.dispatchEvent(new Event("change")); }`, node), nil))
	}
	choose("node-b")
	b.await("one node is shown", fmt.Sprintf(shown, "20", "node-b")+` && location.hash.includes("n=node-b")`)
	b.run(chromedp.Reload())
	b.await("its address shows it again", fmt.Sprintf(shown, "20", "node-b"))
	choose("")
	b.await("all are shown again", fmt.Sprintf(shown, "30", ""))
	b.visit("#/connections")
	b.awaitRows("10.1.0.1:4000 at node-a")
	b.run(chromedp.Click("main tbody tr"))
	b.await("the story is asked of the node that has the connection", `/the proxy of node-a/.test(document.querySelector("#panel .facts")?.innerText) && location.hash.includes("%40node-a")`)
	b.visit("#/services?sel=" + url.QueryEscape("service:"+playedServices[0]+" TCP"))
	b.await("a Service names the clients that it refuses", `/no_endpoints, 12 packets\s+10\.1\.0\.9/.test([...document.querySelectorAll("#panel section")].find((s) => s.querySelector("h3").textContent === "Last failures")?.innerText)`)
	for _, width := range []int64{320, 1440} {
		b.size(width, 700)
		b.await("nothing is cut off", fmt.Sprintf(`document.documentElement.scrollWidth <= %d`, width))
	}
}
