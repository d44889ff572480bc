// The tables of Services and of endpoints.

import { el, text, attribute } from "/js/dom.js";
import { table } from "/js/table.js";
import { count, rate, bytes, time } from "/js/format.js";
import { drained, on, select, serviceKey, store } from "/js/store.js";

/** Draws a name whose namespace is less important. */
export function drawName(cell, name) {
  const at = name.indexOf("/");
  if (cell.shown === name) return;
  cell.shown = name;
  cell.classList.add("named");
  cell.title = name; // it may be cut
  cell.replaceChildren(at < 0 ? "" : el("span", { class: "dim" }, name.slice(0, at + 1)), name.slice(at + 1));
}

/** Draws a number that is bad if it is not zero. */
function drawBad(cell, n, shown) {
  text(cell, n > 0.004 ? shown : "");
  attribute(cell, "data-bad", n > 0.004 ? "" : null);
}

const traffic = (r) => (r ? r.bytes_from_client + r.bytes_from_endpoint : 0);
const of = (r, name) => r?.[name] ?? 0;

const rates = [
  { key: "open", label: "Open", number: true, sort: (x) => of(x.r, "open"), value: (x) => (x.r?.open ? count(x.r.open) : "") },
  { key: "opened", label: "New/s", number: true, sort: (x) => of(x.r, "opened"), value: (x) => (of(x.r, "opened") > 0.005 ? rate(x.r.opened) : "") },
  { key: "failed", label: "Failed/s", number: true, sort: (x) => of(x.r, "failed"), draw: (cell, x) => drawBad(cell, of(x.r, "failed"), rate(of(x.r, "failed"))) },
  { key: "attempts", label: "Attempts failed/s", number: true, class: "wide", sort: (x) => of(x.r, "failed_attempts"), draw: (cell, x) => drawBad(cell, of(x.r, "failed_attempts"), rate(of(x.r, "failed_attempts"))) },
  { key: "connect", label: "Connect 99 %", number: true, class: "wide", sort: (x) => of(x.r, "connect_p99_us"), value: (x) => (x.r?.connect_p99_us ? time(x.r.connect_p99_us) : "") },
  { key: "first", label: "First byte 99 %", number: true, sort: (x) => of(x.r, "first_byte_p99_us"), value: (x) => (x.r?.first_byte_p99_us ? time(x.r.first_byte_p99_us) : "") },
  { key: "median", label: "Lasted 50 %", number: true, class: "widest", sort: (x) => of(x.r, "duration_p50_us"), value: (x) => (x.r?.duration_p50_us ? time(x.r.duration_p50_us) : "") },
  { key: "lasted", label: "Lasted 99 %", number: true, class: "wide", sort: (x) => of(x.r, "duration_p99_us"), value: (x) => (x.r?.duration_p99_us ? time(x.r.duration_p99_us) : "") },
  { key: "bytes", label: "Bytes/s", number: true, sort: (x) => traffic(x.r), value: (x) => (traffic(x.r) > 0.5 ? bytes(traffic(x.r)) : "") },
];

const none = (what) => () => {
  if (!store.servicesKnown) return store.trouble ? "The proxy does not answer" : "Asking…";
  return store.filter ? `No ${what} matches the filter` : `There is no ${what}`;
};

function view(t, rows) {
  const draw = () => t.root.isConnected && t.set(rows());
  for (const event of ["frame", "services", "status"]) on(event, draw);
  on("selection", () => t.select(selectedKey()));
  return { root: t.root, show: draw, hide() {} };
}

function selectedKey() {
  const s = store.selection;
  return s?.kind === "service" ? s.key : s?.kind === "endpoint" ? s.endpoint : null;
}

export function servicesView() {
  const t = table({
    label: "Services", key: (x) => x.key, sort: { key: "name", down: false }, empty: none("Service"),
    open: (x) => select({ kind: "service", key: x.key, service: x.s.service, protocol: x.s.protocol }),
    columns: [
      { key: "name", label: "Service", sort: (x) => x.s.service, draw: (cell, x) => drawName(cell, x.s.service) },
      { key: "protocol", label: "Protocol", class: "widest", sort: (x) => x.s.protocol, value: (x) => x.s.protocol },
      { key: "address", label: "Address", class: "code wide", sort: (x) => x.s.vips?.[0] ?? "", value: (x) => (x.s.vips?.length ? x.s.vips[0] + (x.s.vips[0].includes(":") ? " " : ":") + x.s.port : "none") },
      { key: "ready", label: "Ready", number: true, sort: (x) => x.ready, draw: (cell, x) => {
        text(cell, x.ready + " of " + x.s.endpoints.length);
        attribute(cell, "data-bad", x.ready === 0 ? "" : null);
      } },
      ...rates,
      { key: "all", label: "All", number: true, class: "widest", sort: (x) => x.s.totals.opened, value: (x) => count(x.s.totals.opened) },
    ],
  });
  return view(t, () => store.services.map((s) => ({ s, key: serviceKey(s.service, s.protocol), ready: s.endpoints.filter((e) => e.ready).length, r: store.byService.get(serviceKey(s.service, s.protocol)) }))
    .filter((x) => !store.partial || x.r));
}

/** What keeps new connections off an endpoint, or has it get fewer of them. */
function standing(e) {
  const words = [];
  if (e.ejected) words.push((e.ejected.tried ? "tried again after " : "ejected after ") + e.ejected.why);
  if (e.share) words.push("starts slowly, " + Math.round(100 * e.share) + " %");
  if (e.full) words.push("full");
  return words.join(", ");
}

/** What is said about the state of an endpoint. */
export function stateOf(e) {
  if (drained(e)) return "drained";
  if (e.terminating) return e.serving ? "terminating, serving" : "terminating";
  if (!e.ready) return "not ready";
  return standing(e) || "ready";
}

export function endpointsView() {
  const t = table({
    label: "Endpoints", key: (x) => x.key, sort: { key: "pod", down: false }, empty: none("endpoint"),
    open: (x) => select({ kind: "endpoint", endpoint: x.key }),
    columns: [
      { key: "pod", label: "Pod", sort: (x) => x.e.pod ?? "", draw: (cell, x) => drawName(cell, x.e.pod ?? "–") },
      { key: "endpoint", label: "Address", class: "code", sort: (x) => x.key, value: (x) => x.key },
      { key: "state", label: "State", sort: (x) => stateOf(x.e), draw: (cell, x) => {
        text(cell, stateOf(x.e));
        attribute(cell, "data-quiet", stateOf(x.e) === "ready" ? "" : null);
      } },
      { key: "node", label: "Node", class: "wide", sort: (x) => x.e.node ?? "", value: (x) => x.e.node ?? "" },
      { key: "zone", label: "Zone", class: "widest", sort: (x) => x.e.zone ?? "", value: (x) => x.e.zone ?? "" },
      { key: "services", label: "Services", number: true, class: "widest", sort: (x) => x.services, value: (x) => String(x.services) },
      ...rates,
    ],
  });
  return view(t, () => {
    const all = new Map();
    for (const s of store.services) {
      for (const e of s.endpoints) {
        const x = all.get(e.endpoint);
        if (x) {
          x.services++;
          if (stateOf(x.e) === "ready") x.e = e; // the least good one shows
        } else all.set(e.endpoint, { e, key: e.endpoint, services: 1, r: store.byEndpoint.get(e.endpoint) });
      }
    }
    return [...all.values()].filter((x) => !store.partial || x.r);
  });
}
