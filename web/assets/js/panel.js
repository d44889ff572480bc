// The panel: what is selected, with its charts; without a selection, the node.

import { el, text, attribute, keyed } from "/js/dom.js";
import { charts } from "/js/charts.js";
import { get, poll } from "/js/api.js";
import { bare, clock, count, rate, time } from "/js/format.js";
import { propose } from "/js/filter.js";
import { kept as keptByProxy, measured } from "/js/history.js";
import { story } from "/js/story.js";
import { stateOf } from "/js/tables.js";
import { blamed, edgeKey, endpointsOf, on, select, servicesOf, setNode, store, together } from "/js/store.js";

const row = (k, v) => v && [el("dt", {}, k), el("dd", {}, v)];
const facts = (rows) => el("dl", { class: "facts" }, rows.filter(Boolean).flat());
const link = (label, go) => el("button", { type: "button", class: "link", onclick: go }, label);
const actions = (filter) => el("p", { class: "actions" },
  el("button", { type: "button", class: "quiet", onclick: () => propose(filter) }, "Filter by it"),
  el("button", { type: "button", class: "quiet", onclick: () => propose(filter, "connections") }, "Its connections"),
  el("button", { type: "button", class: "quiet", onclick: () => propose(filter, "records") }, "Its records"));

const quoted = (v) => (/[\s,"=<>!]/.test(v) ? '"' + v.replaceAll('"', "") + '"' : v);

/** The history that the proxy keeps; of all nodes together the page measures it. */
const kept = (queries, filter, changed) => (together() ? measured(filter, changed) : keptByProxy(queries, changed));

/** A list of endpoints or Services with what flows to each. */
function listing(title, items) {
  const list = el("ul", { class: "listing" });
  return {
    root: el("section", {}, el("h3", {}, title), list),
    draw() {
      keyed(list, items(), (x) => x.key, (x) => {
        const parts = { name: el("span", { class: "who" }), said: el("span", { class: "said" }), value: el("span", { class: "value" }) };
        const item = el("li", {}, el("button", { type: "button", class: "line", onclick: x.go }, parts.name, parts.said, parts.value));
        item.parts = parts;
        return item;
      }, (item, x) => {
        text(item.parts.name, x.name);
        text(item.parts.said, x.said);
        text(item.parts.value, x.value);
        attribute(item.parts.said, "data-bad", x.bad ? "" : null);
      });
    },
  };
}

/** The last failures and refusals of an endpoint or a Service. */
function lastFailures(query) {
  const list = el("ul", { class: "listing" });
  const root = el("section", { hidden: true }, el("h3", {}, "Last failures"), list);
  const asking = poll(3000, async (signal) => {
    try {
      const answer = await get("failures", { ...query, limit: 8 }, signal);
      root.hidden = answer.failures.length === 0;
      list.replaceChildren(...answer.failures.map((f) => el("li", {}, el("button", { type: "button", class: "line", disabled: f.packets ? "" : undefined, onclick: () => select({ kind: "connection", id: f.id, proxy: f.proxy_node }) },
        el("span", { class: "who code" }, clock(f.time)), el("span", { class: "said", "data-bad": true }, f.error + (f.packets ? ", " + f.packets + " packets" : " after " + time(f.us))),
        el("span", { class: "value" }, f.packets ? f.client : query.service ? (f.pod ? bare(f.pod) : f.endpoint ?? "") : bare(f.service ?? ""))))));
    } catch {
      root.hidden ||= !signal.aborted;
    }
  });
  return { root, stop: asking.stop };
}

function ofService(s) {
  const find = () => store.services.find((x) => x.service === s.service && x.protocol === s.protocol);
  const top = el("div");
  const endpoints = listing("Endpoints", () => (find()?.endpoints ?? []).map((e) => {
    const r = store.edges.get(edgeKey(s.service, s.protocol, e.endpoint));
    const bad = blamed(r) > 0.02;
    return { key: e.endpoint, name: e.pod ? bare(e.pod) : e.endpoint, bad, said: bad ? rate(blamed(r)) + "/s fail" : stateOf(e) === "ready" ? "" : stateOf(e), value: r?.opened > 0.005 ? rate(r.opened) + "/s" : r?.open ? count(r.open) + " open" : "", go: () => select({ kind: "endpoint", endpoint: e.endpoint }) };
  }));
  const filter = "service=" + quoted(s.service) + " protocol=" + s.protocol;
  const failed = lastFailures({ service: s.service });
  return {
    kind: "Service", title: s.service, past: (changed) => kept([{ by: "service", service: s.service }], filter, changed),
    below: [endpoints.root, failed.root, actions(filter)], top, stop: failed.stop,
    draw() {
      const x = find();
      endpoints.draw();
      if (top.of === x) return;
      top.of = x;
      top.replaceChildren(x ? facts([
        row("Type", x.type + ", " + x.protocol + " " + x.port + (x.node_port ? ", node port " + x.node_port : "")),
        row("Addresses", x.vips?.length ? el("span", { class: "code" }, x.vips.join("\n")) : "none"),
        row("Policy", "inside " + x.internal_traffic_policy + ", outside " + x.external_traffic_policy),
        x.algorithm && row("Algorithm", x.algorithm),
        x.annotations && row("Annotations", Object.entries(x.annotations).map(([name, value]) => name.replace(/^sluice.dev\//, "") + ": " + value).join("\n")),
        (x.held || x.queued) && row("Waiting", [x.held && count(x.held) + " connections, for an endpoint", x.queued && count(x.queued) + " connections, at a limit"].filter(Boolean).join("\n")),
        x.affinity_seconds && row("Affinity", "a client stays with its endpoint for " + time(x.affinity_seconds * 1e6)),
        row("Since the start", count(x.totals.opened) + " connections, " + count(x.totals.retried) + " retried"),
      ]) : el("p", { class: "empty" }, store.servicesKnown ? "It is not there, or the filter hides it." : "Asking…"));
    },
  };
}

function ofEndpoint(s) {
  const top = el("div");
  const services = listing("Services", () => servicesOf(s.endpoint).map((x) => {
    const r = store.edges.get(edgeKey(x.service, x.protocol, s.endpoint));
    return { key: x.service + x.protocol, name: x.service, said: blamed(r) > 0.02 ? rate(blamed(r)) + "/s fail" : "", bad: true, value: r?.opened > 0.005 ? rate(r.opened) + "/s" : "", go: () => select({ kind: "service", key: x.service + " " + x.protocol, service: x.service, protocol: x.protocol }) };
  }));
  const failed = lastFailures({ endpoint: s.endpoint });
  return {
    kind: "Endpoint", title: s.endpoint, past: (changed) => kept([{ by: "endpoint", endpoint: s.endpoint }], "endpoint=" + s.endpoint, changed),
    below: [services.root, failed.root, actions("tried=" + s.endpoint)], top, stop: failed.stop,
    draw() {
      const list = servicesOf(s.endpoint);
      const e = list[0]?.endpoints.find((x) => x.endpoint === s.endpoint);
      services.draw();
      const now = e ? JSON.stringify([e, stateOf(e)]) : "none";
      if (top.of === now) return;
      top.of = now;
      top.replaceChildren(e ? facts([
        e.pod && row("Pod", e.pod), e.node && row("Node", e.node + (e.local ? ", this one" : "")), e.zone && row("Zone", e.zone), row("State", stateOf(e)),
      ]) : el("p", { class: "empty" }, store.servicesKnown ? "No Service has it now, or the filter hides it." : "Asking…"));
    },
  };
}

function ofClient(s) {
  const services = listing("Services that it uses now", () => [...store.clients.values()].filter((r) => r.client === s.client && (r.opened > 0.005 || r.open > 0)).map((r) => (
    { key: r.service + r.protocol, name: r.service, bad: r.failed > 0.02, said: r.failed > 0.02 ? rate(r.failed) + "/s fail" : "", value: r.opened > 0.005 ? rate(r.opened) + "/s" : r.open + " open", go: () => select({ kind: "service", key: r.service + " " + r.protocol, service: r.service, protocol: r.protocol }) })));
  return {
    kind: "Client", title: s.client, past: (changed) => measured("client=" + s.client, changed),
    top: el("p", { class: "hint" }, "The page measures a client while you look at it."), below: [services.root, actions("client=" + s.client)], draw: services.draw,
  };
}

function ofNode() {
  const top = el("div");
  const nodes = listing("Nodes", () => (store.status?.nodes ?? []).map((n) => (
    { key: n.node, name: n.node, bad: Boolean(n.trouble), said: n.trouble ? "no answer: " + n.trouble : n.node === store.node ? "shown" : "", value: "", go: () => setNode(n.node === store.node ? "" : n.node) })));
  return {
    kind: "Node", past: () => ({ list: () => store.past.list(), stop() {} }), top, below: [nodes.root],
    get title() {
      return store.filter ? "What the filter selects" : store.status?.node ?? "This node";
    },
    draw() {
      const s = store.status;
      nodes.root.hidden = !s?.nodes;
      nodes.draw();
      if (!s || top.of === s) return;
      top.of = s;
      const problems = s.problems ?? [];
      top.replaceChildren(facts([
        row("Serves", count(s.service_ports) + " Service ports, " + count(s.endpoints) + " endpoints"),
        row("From", s.source + (s.connected === false ? ", not connected" : "")),
        row("Steered by", s.steering.mode + (s.steering.complete ? "" : ", not complete")),
        row("Relayed", count(s.connections) + " connections of at most " + count(s.connections_limit)),
        row("Data path", s.flows_limit ? "kernel: " + count(s.flows) + " of at most " + count(s.flows_limit) : s.data_path + (s.data_path_reason ? ", " + s.data_path_reason : "")),
        row("Version", s.version),
        s.drained?.length && row("Drained", s.drained.map((d) => d.pod || d.endpoint).join(", ")),
      ]), s.trouble ? el("p", { class: "wrong" }, s.trouble) : "",
      problems.length ? el("details", { class: "problems" }, el("summary", {}, s.problems_count === 1 ? "One object is not served as it says" : count(s.problems_count) + " objects are not served as they say"),
        el("ul", {}, problems.map((p) => el("li", {}, el("b", {}, p.object), " ", p.text)))) : "");
    },
  };
}

function ofPod(s) {
  const top = el("div");
  const addresses = listing("Addresses", () => endpointsOf(s.pod).map((e) => {
    const r = store.byEndpoint.get(e.endpoint);
    const bad = blamed(r) > 0.02;
    return { key: e.endpoint, name: e.endpoint, bad, said: bad ? rate(blamed(r)) + "/s fail" : stateOf(e) === "ready" ? "" : stateOf(e), value: r?.opened > 0.005 ? rate(r.opened) + "/s" : r?.open ? count(r.open) + " open" : "", go: () => select({ kind: "endpoint", endpoint: e.endpoint }) };
  }));
  const first = endpointsOf(s.pod).slice(0, 4);
  return {
    kind: "Pod", title: s.pod, past: (changed) => kept(first.map((e) => ({ by: "endpoint", endpoint: e.endpoint })), "pod=" + quoted(s.pod), changed),
    below: [addresses.root, actions("pod=" + quoted(s.pod))], top,
    late: () => first.length === 0 && endpointsOf(s.pod).length > 0, // its addresses were not known
    draw() {
      const e = endpointsOf(s.pod)[0];
      addresses.draw();
      const now = e ? e.node + " " + e.zone : "none";
      if (top.of === now) return;
      top.of = now;
      top.replaceChildren(e ? facts([e.node && row("Node", e.node + (e.local ? ", this one" : "")), e.zone && row("Zone", e.zone)])
        : el("p", { class: "empty" }, store.servicesKnown ? "No Service has it now, or the filter hides it." : "Asking…"));
    },
  };
}

const kinds = { pod: ofPod, service: ofService, endpoint: ofEndpoint, client: ofClient, connection: story };

export function panel(root) {
  let shown = null;
  let picture = null;
  let past = null;
  let opener = null;
  const kind = el("span", { class: "kind" });
  const title = el("h2", { tabindex: "-1" });
  const close = el("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => select(null) }, "✕");
  const content = el("div", { class: "content" });
  root.append(el("header", {}, el("div", {}, kind, title), close), content);

  function open() {
    shown?.stop?.();
    past?.stop();
    const s = store.selection;
    shown = s ? kinds[s.kind](s) : ofNode();
    picture = shown.past ? charts() : null;
    past = shown.past?.(() => picture.draw(past.list()));
    content.replaceChildren(...(shown.kind === "Connection" ? [shown.root] : [shown.top, picture?.root ?? "", ...shown.below]));
    content.scrollTop = 0;
    root.classList.toggle("chosen", Boolean(s));
    close.hidden = !s;
    draw();
    picture?.draw(past.list());
    if (s && !opener) opener = document.activeElement;
    if (s && matchMedia("(max-width: 1099px)").matches) title.focus();
    if (!s && opener?.isConnected) opener.focus();
    if (!s) opener = null;
  }

  function draw() {
    text(kind, shown.kind);
    text(title, shown.title);
    shown.draw?.();
  }

  on("selection", open);
  for (const event of ["frame", "services", "status", "clients", "filter"]) on(event, draw);
  on("services", () => shown.late?.() && open());
  on("past", () => !store.selection && picture?.draw(past.list()));
  open();
}
