// What the map shows: clients, Services and endpoints, few enough to be read, and the
// lines between them. It knows no elements.

import { namespace, bare, byName } from "/js/format.js";
import { blamed, drained, edgeKey, serviceKey, store } from "/js/store.js";

const limits = {
  services: 28, // more are grouped by namespace, and more namespaces than these together
  inNamespace: 10, // Services of an open namespace, at least
  clients: 14, // more are grouped by network
  endpoints: 42, // more are grouped by their Services
};

const zero = () => ({ opened: 0, open: 0, bytes: 0, failed: 0, saved: 0, tries: 0 });

function add(sum, row, failures) {
  sum.opened += row.opened;
  sum.open += row.open;
  sum.bytes += row.bytes_from_client + row.bytes_from_endpoint;
  sum.failed += failures;
  sum.saved += row.saved_attempts;
  sum.tries += row.opened + failures;
}

/** The network of an address: /24 or /64. */
export function network(address) {
  if (!address.includes(":")) return address.slice(0, address.lastIndexOf(".")) + ".0/24";
  const [start, end] = address.split("::").map((half) => (half ? half.split(":") : []));
  const zeros = end ? Array(8 - start.length - end.length).fill("0") : [];
  const parts = [...start, ...zeros, ...(end ?? [])].slice(0, 4);
  return parts.join(":").replace(/(^|:)0(:0)*$/, "") + "::/64";
}

const busy = new Map(); // Services by when they were last busy, so that they do not flicker

/** What showing a Service is worth: 1 if it was busy in the last minute, more if it is chosen. */
function worth(s, chosen) {
  const key = serviceKey(s.service, s.protocol), now = Date.now();
  const r = store.byService.get(key);
  if (r && (r.opened > 0.05 || r.open > 0)) busy.set(key, now + Math.min(r.opened, 1000));
  return key === chosen ? 2 : (busy.get(key) ?? 0) > now - 60000 ? 1 : 0;
}

/** Parts a sorted list into those that are worth most, at most so many, and the others. */
function best(list, value, most) {
  if (list.length <= most) return [list, []];
  const values = new Map(list.map((x) => [x, value(x)]));
  const kept = new Set([...list].sort((a, b) => values.get(b) - values.get(a)).slice(0, most)); // stable
  return [list.filter((x) => kept.has(x)), list.filter((x) => !kept.has(x))];
}

/**
 * Returns {clients, groups, endpoints, links, many}. A group is a namespace with nodes;
 * each node has an id, a label and its sums. open are the namespaces that are open.
 */
export function model(open) {
  const chosen = store.selection?.kind === "service" ? store.selection.key : null;
  const all = store.partial ? store.services.filter((s) => store.byService.has(serviceKey(s.service, s.protocol))) : store.services;
  const byNamespace = new Map();
  for (const s of [...all].sort((a, b) => byName(a.service, b.service))) {
    const ns = namespace(s.service);
    if (!byNamespace.has(ns)) byNamespace.set(ns, []);
    byNamespace.get(ns).push(s);
  }
  const many = all.length > limits.services;
  const place = new Map(); // of a Service: the id of its node
  const groups = [];
  let pods = 0;
  const [namespaces, quiet] = best([...byNamespace], ([ns, list]) => (open.has(ns) ? 3 : list.reduce((most, s) => Math.max(most, worth(s, chosen)), 0)), limits.services);
  for (const [ns, list] of namespaces) {
    const isOpen = !many || open.has(ns);
    const group = { namespace: ns, open: isOpen, many, nodes: [] };
    if (isOpen) {
      const [shown, left] = best(list, (s) => worth(s, chosen), many ? Math.max(limits.inNamespace, limits.services - namespaces.length) : Infinity);
      for (const s of shown) {
        const key = serviceKey(s.service, s.protocol);
        const ready = s.endpoints.filter((e) => e.ready).length;
        group.nodes.push({ id: "s " + key, kind: "service", key, service: s, label: bare(s.service), protocol: s.protocol, ready, sums: zero() });
        place.set(key, "s " + key);
      }
      if (left.length) {
        group.nodes.push({ id: "r " + ns, kind: "rest", namespace: ns, label: left.length + " quiet ones", sums: zero() });
        for (const s of left) place.set(serviceKey(s.service, s.protocol), "r " + ns);
      }
    } else {
      group.nodes.push({ id: "n " + ns, kind: "namespace", namespace: ns, label: ns, count: list.length, sums: zero() });
      for (const s of list) place.set(serviceKey(s.service, s.protocol), "n " + ns);
    }
    for (const s of list) pods += place.get(serviceKey(s.service, s.protocol)).startsWith("s ") ? s.endpoints.length : 0;
    groups.push(group);
  }
  if (quiet.length) {
    const list = quiet.flatMap(([, services]) => services);
    groups.push({ namespace: "", open: false, many, nodes: [{ id: "q", kind: "namespaces", label: quiet.length + " quiet namespaces", count: list.length, sums: zero() }] });
    for (const s of list) place.set(serviceKey(s.service, s.protocol), "q");
  }
  const nodes = new Map(groups.flatMap((g) => g.nodes).map((n) => [n.id, n]));

  const links = new Map();
  const link = (from, to) => {
    const id = from + " > " + to;
    if (!links.has(id)) links.set(id, { id, from, to, ...zero() });
    return links.get(id);
  };

  // Endpoints: single ones of Services that are shown, else those of a node together.
  const endpoints = new Map();
  for (const s of all) {
    const key = serviceKey(s.service, s.protocol);
    const at = place.get(key);
    const single = at.startsWith("s ") && (pods <= limits.endpoints || key === chosen);
    for (const e of s.endpoints) {
      const id = single ? "e " + (e.pod || e.endpoint) : "E " + at;
      let node = endpoints.get(id);
      if (!node) {
        node = single
          ? { id, kind: "endpoint", endpoint: e, pod: e.pod, addresses: new Set(), label: e.pod ? bare(e.pod) : e.endpoint, state: stateOf(e), sums: zero() }
          : { id, kind: "endpoints", at, seen: new Set(), label: "", sums: zero() };
        endpoints.set(id, node);
      }
      if (single) {
        node.addresses.add(e.endpoint);
        if (!stateOf(e)) node.state = "";
      } else {
        node.seen.add(e.endpoint);
        node.label = node.seen.size + (node.seen.size === 1 ? " endpoint" : " endpoints");
      }
      const row = store.edges.get(edgeKey(s.service, s.protocol, e.endpoint));
      const l = link(at, id);
      if (row) {
        add(l, row, blamed(row));
        add(node.sums, row, blamed(row));
        node.lastFailed = Math.max(node.lastFailed ?? 0, row.lastFailed);
      }
    }
  }

  // Clients.
  const addresses = new Set([...store.clients.values()].map((r) => r.client));
  const grouped = addresses.size > limits.clients;
  const load = new Map();
  for (const r of store.clients.values()) {
    const name = grouped ? network(r.client) : r.client;
    load.set(name, (load.get(name) ?? 0) + r.opened + r.open / 10);
  }
  const kept = new Set([...load.keys()].sort((a, b) => load.get(b) - load.get(a) || byName(a, b)).slice(0, limits.clients - 1));
  const others = load.size > limits.clients;
  const clients = new Map();
  for (const r of store.clients.values()) {
    const at = place.get(serviceKey(r.service, r.protocol));
    if (!at) continue;
    const name = grouped ? network(r.client) : r.client;
    const shown = !others || kept.has(name);
    const id = shown ? "c " + name : "c others";
    let node = clients.get(id);
    if (!node) {
      node = { id, kind: grouped || !shown ? "network" : "client", label: shown ? name : "others", address: shown ? name : null, sums: zero() };
      clients.set(id, node);
    }
    const l = link(id, at);
    add(l, r, r.failed);
    add(node.sums, r, r.failed);
  }
  for (const r of store.byService.values()) {
    const node = nodes.get(place.get(serviceKey(r.service, r.protocol)));
    if (node) add(node.sums, r, r.failed);
  }
  const list = [...clients.values()].sort((a, b) => (a.id === "c others") - (b.id === "c others") || byName(a.label, b.label));
  return { clients: list, groups, endpoints: [...endpoints.values()], links: [...links.values()], many };
}

function stateOf(e) {
  if (drained(e)) return "drained";
  if (e.terminating) return "terminating";
  if (!e.ready) return "not ready";
  return e.ejected ? "ejected" : e.full ? "full" : e.share ? "starts slowly" : "";
}

/** How bad the failures of sums are: 0 none, 1 few, or such as no client has noticed, 2 some, 3 most. */
export function badness(sums) {
  if (sums.failed < 0.02) return sums.saved < 0.02 ? 0 : 1;
  const part = sums.failed / Math.max(sums.tries, sums.failed);
  return part < 0.05 ? 1 : part < 0.4 ? 2 : 3;
}
