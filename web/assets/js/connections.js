// The table of open connections. The proxy filters and sorts.

import { table } from "/js/table.js";
import { el, text, attribute } from "/js/dom.js";
import { get, poll } from "/js/api.js";
import { exporter } from "/js/export.js";
import { bytes, time } from "/js/format.js";
import { note } from "/js/samples.js";
import { drawName } from "/js/tables.js";
import { on, select, store } from "/js/store.js";

/** Draws who serves a connection: the pod's name, else the address. */
export function drawEndpoint(cell, c) {
  if (c.pod) drawName(cell, c.pod);
  else drawName(cell, c.endpoint ?? "none yet");
  attribute(cell, "title", c.endpoint);
}

/** The node whose proxy has a connection, where the page is of several. */
export const at = (c) => (c.proxy_node ? " at " + c.proxy_node : "");

export const columns = [
  { key: "client", label: "Client", class: "code", value: (c) => c.client + at(c) },
  { key: "service", label: "Service", draw: (cell, c) => drawName(cell, c.service ?? c.vip) },
  { key: "endpoint", label: "Endpoint", draw: drawEndpoint },
  { key: "state", label: "State", draw: (cell, c) => {
    text(cell, c.state === "open" ? (c.path === "kernel" ? "open, in the kernel" : "open") : c.state);
    attribute(cell, "data-quiet", c.state === "open" ? "" : null);
  } },
  { key: "attempts", label: "Attempts", number: true, draw: (cell, c) => {
    text(cell, String(c.attempts));
    attribute(cell, "data-bad", c.failed_attempts?.length ? "" : null);
  } },
  { key: "connect", label: "Connect", number: true, class: "wide", value: (c) => time(c.connect_us) },
  { key: "bytes", label: "Bytes", number: true, value: (c) => bytes(c.bytes_from_client + c.bytes_from_endpoint) },
  { key: "duration", label: "Age", number: true, value: (c) => time(c.duration_us) },
];

export function connectionsView() {
  let asking = null;
  let failed = null;
  let known = false;
  const t = table({
    label: "Open connections", columns, key: (c) => c.id + at(c), sort: { key: "duration", down: false },
    open: (c) => select({ kind: "connection", id: c.id, seen: c }),
    query: () => asking?.now(),
    empty: () => (failed ? failed : !known ? "Asking…" : store.filter ? "No open connection matches the filter" : "No connection is open"),
  });
  const matching = async (limit, signal) => (await get("connections", { filter: store.filter, limit }, signal)).connections;
  const root = el("div", { class: "connections" }, el("div", { class: "tools" }, exporter("connections", matching)), t.root);

  async function ask(signal) {
    const { by, first, page } = t.asked();
    try {
      const answer = await get("connections", { filter: store.filter, sort: (by.down ? "-" : "") + by.key, offset: first, limit: page }, signal);
      failed = null;
      known = true;
      for (const c of answer.connections) note(c);
      t.set(answer.connections, answer.matched);
    } catch (error) {
      if (signal.aborted) return;
      failed = error.message;
      t.set([], 0);
    }
  }

  on("filter", () => {
    t.first();
    asking?.now();
  });
  on("selection", () => t.select(store.selection?.kind === "connection" ? store.selection.id + at({ proxy_node: store.selection.seen?.proxy_node ?? store.selection.proxy }) : null));
  return {
    root,
    show() {
      asking ??= poll(500, ask);
    },
    hide() {
      asking?.stop();
      asking = null;
    },
  };
}
