// The map: clients, Services and endpoints, and between them lines as wide as what flows.

import { el, svg, text, attribute, keyed, soon } from "/js/dom.js";
import { model, badness } from "/js/mapmodel.js";
import { count, rate, bytes } from "/js/format.js";
import { emit, on, select, store, watchClients } from "/js/store.js";
import { propose } from "/js/filter.js";

const measures = [
  { key: "opened", label: "New a second", show: (v) => rate(v) + "/s" },
  { key: "open", label: "Open", show: (v) => count(v) },
  { key: "bytes", label: "Bytes a second", show: (v) => bytes(v) + "/s" },
];

export function mapView() {
  let measure = measures[0];
  let stopClients = null;
  let current = { clients: [], groups: [], endpoints: [], links: [] };
  let hovered = null;
  const opened = new Set();

  const choices = el("div", { class: "choices", role: "radiogroup", "aria-label": "What the width of a line shows" },
    measures.map((m) => el("button", { type: "button", role: "radio", "aria-checked": String(m === measure), onclick: (e) => {
      measure = m;
      for (const b of e.target.parentNode.children) attribute(b, "aria-checked", String(b === e.target));
      draw();
    } }, m.label)));
  const lines = svg("svg", { class: "links", "aria-hidden": "true" });
  const columns = ["Clients", "Services", "Endpoints"].map((name) => {
    const list = el("div", { class: "nodes" });
    return { list, root: el("section", { class: "column", "aria-label": name }, el("h2", {}, name), list) };
  });
  const [clients, services, endpoints] = columns.map((c) => c.list);
  const noClients = el("p", { class: "none" }, "No client connects now");
  const board = el("div", { class: "board" }, lines, columns.map((c) => c.root));
  columns[0].root.append(noClients);
  const legend = el("p", { class: "legendline" },
    el("span", {}, el("i", { class: "key b0" }), "without failures"), el("span", {}, el("i", { class: "key b1" }), "under 5 % fail, or only attempts"),
    el("span", {}, el("i", { class: "key b2" }), "under 40 %"), el("span", {}, el("i", { class: "key b3" }), "more"), el("span", {}, el("i", { class: "key idle" }), "nothing now"));
  const root = el("div", { class: "map" }, el("div", { class: "tools" }, choices, legend), board);

  const elements = new Map();

  function node(n) {
    const name = el("span", { class: "name" });
    const extra = el("span", { class: "extra" });
    const value = el("span", { class: "value" });
    const card = el("button", { type: "button", class: "node " + n.kind, onclick: () => choose(card.item),
      onpointerenter: () => focusOn(card.item.id), onpointerleave: () => focusOn(null), onfocus: () => card.matches(":focus-visible") && focusOn(card.item.id), onblur: () => focusOn(null) },
      el("span", { class: "names" }, name, extra), value);
    card.parts = { name, extra, value };
    return card;
  }

  function choose(n) {
    switch (n.kind) {
      case "service":
        return select({ kind: "service", key: n.key, service: n.service.service, protocol: n.service.protocol });
      case "endpoint":
        return select(n.pod ? { kind: "pod", pod: n.pod } : { kind: "endpoint", endpoint: n.endpoint.endpoint });
      case "client":
        return select({ kind: "client", client: n.address });
      case "namespace":
        opened.clear(); // one at a time, so that the map stays small
        opened.add(n.namespace);
        return draw();
      case "rest":
        return propose("namespace=" + n.namespace, "services");
      case "namespaces":
        return emit("go", "services");
      case "network":
        return n.address && propose("client=" + n.address);
    }
  }

  function isChosen(n) {
    const s = store.selection;
    switch (s?.kind) {
      case "service":
        return n.key === s.key;
      case "pod":
        return n.kind === "endpoint" && n.pod === s.pod;
      case "endpoint":
        return n.kind === "endpoint" && n.addresses.has(s.endpoint);
      case "client":
        return n.kind === "client" && n.address === s.client;
      default:
        return false;
    }
  }

  function change(card, n) {
    card.item = n;
    elements.set(n.id, card);
    const v = n.sums[measure.key];
    drawPort(card.parts.name, n.label, n.kind === "service");
    const bad = badness(n.sums);
    let extra = "";
    if (n.kind === "service") extra = n.ready === 0 ? "no endpoint" : n.protocol === "TCP" ? "" : n.protocol;
    else if (n.count) extra = n.count + (n.count === 1 ? " Service" : " Services");
    else if (n.kind === "endpoint") extra = n.state;
    const ago = Math.round((Date.now() - (n.lastFailed ?? 0)) / 1000);
    if (bad && n.kind === "endpoint") extra = n.sums.failed < 0.02 ? rate(n.sums.saved) + "/s tried again" : rate(n.sums.failed) + "/s fail";
    else if (n.kind === "endpoint" && !n.state && ago < 60) extra = "failed " + ago + " s ago";
    text(card.parts.extra, extra);
    text(card.parts.value, v > 0.005 ? measure.show(v) : "");
    attribute(card, "data-bad", bad || null);
    attribute(card, "data-late", !bad && ago < 60 ? "" : null);
    attribute(card, "data-state", n.kind === "service" && n.ready === 0 ? "empty" : n.state || null);
    attribute(card, "aria-pressed", isChosen(n) ? "true" : null);
    attribute(card, "title", titleOf(n, v));
  }

  /** Draws a name whose port is less important. */
  function drawPort(cell, name, isService) {
    const at = isService ? name.indexOf(":") : -1;
    if (cell.shown === name) return;
    cell.shown = name;
    cell.replaceChildren(...(at < 0 ? [name] : [name.slice(0, at), el("span", { class: "port" }, name.slice(at))]));
  }

  function titleOf(n, v) {
    const what = n.kind === "service" ? n.service.service + " " + n.protocol + "\n" + (n.service.vips ?? []).join(", ") : n.kind === "endpoint" ? (n.pod ? n.pod + "\n" : "") + [...n.addresses].join(", ") : n.label;
    return what + "\n" + measure.label + ": " + measure.show(v) + (n.sums.failed > 0.02 ? "\nfailures: " + rate(n.sums.failed) + "/s" : "") + (n.sums.saved > 0.02 ? "\nfailed attempts after which another endpoint served: " + rate(n.sums.saved) + "/s" : "");
  }

  function group(g) {
    const list = el("div", { class: "nodes" });
    const head = el("button", { type: "button", class: "heading", onclick: () => {
      opened.delete(root.item.namespace);
      draw();
    } });
    const root = el("div", { class: "group" }, head, list);
    root.parts = { head, list };
    return root;
  }

  function draw() {
    if (!root.isConnected) return;
    current = model(opened);
    elements.clear();
    keyed(clients, current.clients, (n) => n.id, node, change);
    noClients.hidden = current.clients.length > 0;
    keyed(services, current.groups, (g) => g.namespace, group, (element, g) => {
      element.item = g;
      text(element.parts.head, g.open && g.many ? g.namespace + "  ▾" : g.namespace);
      element.parts.head.hidden = !g.open;
      element.parts.head.disabled = !g.many;
      keyed(element.parts.list, g.nodes, (n) => n.id, node, change);
    });
    keyed(endpoints, current.endpoints, (n) => n.id, node, change);
    const most = Math.max(current.clients.length, current.endpoints.length, current.groups.reduce((n, g) => n + g.nodes.length + 1, 0));
    attribute(board, "data-room", most <= 10 ? "much" : most <= 16 ? "some" : "none");
    connect();
  }

  /** Draws the lines between what is drawn. */
  function connect() {
    const box = board.getBoundingClientRect();
    if (box.width === 0) return;
    attribute(lines, "width", box.width);
    attribute(lines, "height", box.height);
    const boxes = new Map();
    for (const [id, element] of elements) boxes.set(id, element.getBoundingClientRect());
    const middle = (id) => boxes.get(id).top + boxes.get(id).height / 2;
    const drawn = current.links.filter((l) => boxes.has(l.from) && boxes.has(l.to));
    const most = Math.max(1e-9, ...drawn.map((l) => l[measure.key]));
    // Lines leave a card one below the other, in the order of where they go.
    const offsets = new Map();
    for (const side of ["from", "to"]) {
      const other = side === "from" ? "to" : "from";
      const at = new Map();
      for (const l of drawn) at.set(l[side], [...(at.get(l[side]) ?? []), l]);
      for (const [id, list] of at) {
        list.sort((a, b) => middle(a[other]) - middle(b[other]));
        const room = boxes.get(id).height - 12;
        list.forEach((l, i) => offsets.set(side + l.id, list.length < 2 ? 0 : Math.min(room / (list.length - 1), 5) * (i - (list.length - 1) / 2)));
      }
    }
    const places = drawn.map((l) => {
      const a = boxes.get(l.from), b = boxes.get(l.to);
      const x1 = a.right - box.left, x2 = b.left - box.left;
      const y1 = middle(l.from) - box.top + offsets.get("from" + l.id), y2 = middle(l.to) - box.top + offsets.get("to" + l.id);
      const mid = (x1 + x2) / 2;
      const v = l[measure.key];
      const bad = badness(l);
      const width = v > 0.005 ? 1.5 + 6.5 * Math.sqrt(v / most) : bad ? 2 : 1;
      return { l, width, bad, idle: v <= 0.005 && !bad, d: `M${x1.toFixed(1)} ${y1.toFixed(1)}C${mid.toFixed(1)} ${y1.toFixed(1)} ${mid.toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}` };
    });
    places.sort((a, b) => a.bad - b.bad);
    keyed(lines, places, (p) => p.l.id, () => svg("path"), (path, p) => {
      path.item = p.l;
      attribute(path, "d", p.d);
      attribute(path, "class", "link " + (p.idle ? "idle" : "b" + p.bad));
      attribute(path, "stroke-width", p.width.toFixed(1));
    });
    dim();
  }

  function focusOn(id) {
    hovered = id;
    dim();
  }

  /** Leaves visible what belongs to the node under the pointer, or to the selection. */
  function dim() {
    const chosen = [...elements.values()].find((e) => e.getAttribute("aria-pressed") === "true")?.item.id;
    const id = elements.has(hovered) ? hovered : chosen; // a node that is removed is never left
    board.classList.toggle("focused", Boolean(id));
    if (!id) return;
    const near = new Set([id]);
    const isService = /^[snrq]\b/.test(id);
    const through = new Set(current.links.filter((l) => (l.from === id || l.to === id) && (l.opened > 0.005 || l.open > 0 || l.failed > 0.02 || isService)).flatMap((l) => [l.from, l.to]).filter((n) => /^[snrq]\b/.test(n)));
    for (const l of current.links) {
      const mine = isService ? l.from === id || l.to === id : l.from === id || l.to === id ? through.has(l.from) || through.has(l.to) : false;
      if (mine) near.add(l.from).add(l.to);
      l.near = mine;
    }
    for (const [key, element] of elements) element.classList.toggle("near", near.has(key));
    for (const path of lines.children) path.classList.toggle("near", Boolean(path.item.near));
  }

  board.addEventListener("keydown", (e) => {
    const nodes = [...board.querySelectorAll("button.node")];
    const at = nodes.indexOf(document.activeElement);
    if (at < 0 || !["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"].includes(e.key)) return;
    e.preventDefault();
    const column = (n) => n.closest(".column");
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      const same = nodes.filter((n) => column(n) === column(nodes[at]));
      same[same.indexOf(nodes[at]) + (e.key === "ArrowDown" ? 1 : -1)]?.focus();
      return;
    }
    const to = e.key === "ArrowRight" ? column(nodes[at]).nextElementSibling : column(nodes[at]).previousElementSibling;
    const y = nodes[at].getBoundingClientRect().top;
    const there = nodes.filter((n) => column(n) === to);
    there.sort((a, b) => Math.abs(a.getBoundingClientRect().top - y) - Math.abs(b.getBoundingClientRect().top - y));
    there[0]?.focus();
  });

  new ResizeObserver(() => root.isConnected && connect()).observe(board);
  addEventListener("scroll", () => root.isConnected && board.dataset.room === "none" && connect(), { passive: true }); // clients stay where they are seen
  const changed = soon(draw);
  for (const event of ["frame", "clients", "services", "selection", "status"]) on(event, changed);

  return {
    root,
    show() {
      stopClients ??= watchClients();
      draw();
    },
    hide() {
      stopClients?.();
      stopClients = null;
    },
  };
}
