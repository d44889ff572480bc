// The page: views, what is selected, keys.

import { el, text, attribute } from "/js/dom.js";
import { begin, emit, on, pause, select, setFilter, setNode, store } from "/js/store.js";
import { filterBox } from "/js/filter.js";
import { strip } from "/js/strip.js";
import { panel } from "/js/panel.js";
import { mapView } from "/js/map.js";
import { endpointsView, servicesView } from "/js/tables.js";
import { connectionsView } from "/js/connections.js";
import { recordsView } from "/js/records.js";
import { explainView } from "/js/explain.js";
import { help } from "/js/help.js";

const views = [
  { name: "map", label: "Map", make: mapView },
  { name: "services", label: "Services", make: servicesView },
  { name: "endpoints", label: "Endpoints", make: endpointsView },
  { name: "connections", label: "Connections", make: connectionsView },
  { name: "records", label: "Records", make: recordsView },
  { name: "explain", label: "Explain", make: explainView },
];

const $ = (id) => document.getElementById(id);
const place = $("view");
let current = null;

const tabs = views.map((v, i) => el("a", { href: "#/" + v.name, "aria-keyshortcuts": String(i + 1) }, v.label));
$("tabs").append(...tabs);

/** What the address says: the view, the filter, the selection. */
function read() {
  const [path, query] = location.hash.slice(1).split("?");
  const params = new URLSearchParams(query);
  let selection = null;
  const [kind, ...rest] = (params.get("sel") ?? "").split(":");
  const value = rest.join(":");
  if (kind === "service") {
    const at = value.lastIndexOf(" ");
    selection = { kind, key: value, service: value.slice(0, at), protocol: value.slice(at + 1) };
  } else if (kind === "endpoint") selection = { kind, endpoint: value };
  else if (kind === "pod") selection = { kind, pod: value };
  else if (kind === "client") selection = { kind, client: value };
  else if (kind === "connection" && /^\d+(@|$)/.test(value)) {
    const [id, time, proxy] = value.split("@"); // a proxy that starts again gives numbers again
    selection = { kind, id: Number(id), time: time || undefined, proxy };
  }
  const asked = (params.get("q") ?? "").split(" ");
  const question = asked.length === 3 ? { protocol: asked[0], from: asked[1], to: asked[2] } : null;
  return { view: views.find((v) => "/" + v.name === path) ?? views[0], node: params.get("n") ?? "", filter: params.get("f") ?? "", selection, question };
}

const connectionOf = (s) => {
  const time = s.seen?.time ?? s.time ?? "", proxy = s.seen?.proxy_node ?? s.proxy;
  return s.id + (time || proxy ? "@" + time : "") + (proxy ? "@" + proxy : "");
};
const valueOf = (s) => s && s.kind + ":" + (s.key ?? s.endpoint ?? s.pod ?? s.client ?? connectionOf(s));
const textOf = (q) => q && [q.protocol, q.from, q.to].join(" ");

/** Writes it into the address, as a step of the browser's history or in the place of the last one. */
function write(how = "pushState") {
  const params = new URLSearchParams();
  if (store.node) params.set("n", store.node);
  if (store.filter) params.set("f", store.filter);
  if (store.selection) params.set("sel", valueOf(store.selection));
  const query = params.toString();
  if (store.question && current.name === "explain") params.set("q", textOf(store.question));
  const own = params.toString();
  const hash = "#/" + current.name + (own ? "?" + own : "");
  if (hash !== location.hash) history[how](null, "", hash);
  tabs.forEach((t, i) => t.setAttribute("href", "#/" + views[i].name + (query ? "?" + query : "")));
}

function show(view) {
  if (view === current) return;
  current?.made.hide();
  current = view;
  view.made ??= view.make();
  place.replaceChildren(view.made.root);
  place.dataset.view = view.name;
  place.scrollTop = 0;
  tabs.forEach((t, i) => attribute(t, "aria-current", views[i] === view ? "page" : null));
  view.made.show();
}

let arrival = null; // what waits for the proxy's answer to the filter of the address

/** Goes where the address says: the filter first, so that no view shows what it excludes. */
async function arrive() {
  arrival?.abort();
  const { signal } = (arrival = new AbortController());
  const to = read();
  setNode(to.node);
  if (to.filter !== store.filter) await setFilter(to.filter, signal).catch(() => signal.aborted || emit("propose", to.filter));
  if (signal.aborted) return;
  show(to.view);
  if (valueOf(to.selection) !== valueOf(store.selection)) select(to.selection);
  if (to.question && textOf(to.question) !== textOf(store.question)) emit("question", to.question);
  arrival = null;
  write("replaceState");
}

/** Goes to a view, whatever an address waits for. */
function go(view) {
  arrival?.abort();
  arrival = null;
  show(view);
  write();
}

on("go", (name) => go(views.find((v) => v.name === name)));
for (const event of ["selection", "filter", "asked"]) on(event, () => arrival || write());

/** Names the nodes that do not answer. */
function away(nodes) {
  const names = nodes.filter((n) => n.trouble).map((n) => n.node);
  return "no answer of " + names.slice(0, 3).join(", ") + (names.length > 3 ? " and " + (names.length - 3) + " more" : "");
}

/** Offers the nodes, where there are several. */
function chooser() {
  const nodes = store.status?.nodes, select = $("nodes");
  select.hidden = !nodes;
  $("node").hidden = Boolean(nodes);
  if (!nodes) return;
  const names = nodes.map((n) => n.node);
  if (store.node && !names.includes(store.node)) names.push(store.node); // of an address
  const shown = names.join(" ");
  if (select.shown !== shown) select.replaceChildren(el("option", { value: "" }, "All " + nodes.length + " nodes"), ...names.map((name) => el("option", { value: name }, name)));
  select.shown = shown;
  select.value = store.node;
}
$("nodes").addEventListener("change", () => setNode($("nodes").value));
for (const event of ["status", "filter"]) on(event, chooser);

function state() {
  const s = store.status;
  let kind = "good", said = "ready", more = "";
  if (store.paused) [kind, said] = ["wait", "paused"];
  else if (store.trouble) [kind, said, more] = ["bad", "no answer", store.trouble];
  else if (!s) [kind, said] = ["wait", "asking"];
  else if (!s.ready) [kind, said, more] = ["bad", "not in force", s.trouble ?? ""];
  else if (s.nodes?.some((n) => n.trouble)) [kind, said, more] = ["warn", away(s.nodes), s.nodes.filter((n) => n.trouble).map((n) => n.node + ": " + n.trouble).join("\n")];
  else if (s.connected === false) [kind, said] = ["warn", "API server away"];
  const pill = $("state");
  text(pill, said);
  attribute(pill, "data-kind", kind);
  attribute(pill, "title", more || null);
  attribute(document.body, "data-away", store.trouble ? "" : null);
  text($("node"), s?.node ?? "");
  document.title = s?.node ? "Sluice on " + s.node : "Sluice";
}
for (const event of ["status", "trouble", "paused"]) on(event, state);
state();

$("pause").addEventListener("click", () => pause(!store.paused));
on("paused", () => {
  text($("pause"), store.paused ? "Go on" : "Pause");
  attribute($("pause"), "aria-pressed", String(store.paused));
});

const themes = ["", "light", "dark"];
const labels = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
function theme(next) {
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  text($("theme"), labels[next]);
  try {
    localStorage.setItem("sluice.theme", next);
  } catch {
    // The browser keeps nothing for this page.
  }
}
text($("theme"), labels[document.documentElement.dataset.theme ?? ""]);
$("theme").addEventListener("click", () => theme(themes[(themes.indexOf(document.documentElement.dataset.theme ?? "") + 1) % themes.length]));

strip($("strip"));
const box = filterBox($("filter"));
panel($("panel"));
const keys = help();

// Its address would be taken for that of a view.
document.querySelector(".skip").addEventListener("click", (e) => {
  e.preventDefault();
  place.focus();
});

addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  const typing = e.target.matches?.("input[type=text], select, textarea");
  if (e.key === "Escape" && !typing && store.selection) return select(null);
  if (typing) return;
  if (e.key === "/") {
    e.preventDefault();
    box.focus();
  } else if (e.key === "?") keys.open();
  else if (e.key === "p") pause(!store.paused);
  else if (/^[1-6]$/.test(e.key)) go(views[e.key - 1]);
});

addEventListener("hashchange", arrive);
begin();
arrive();
