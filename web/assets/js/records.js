// The stream of records: connections as they end, and if wanted as they open. It begins
// with those that ended before.

import { el, text, attribute, keyed } from "/js/dom.js";
import { follow, lines } from "/js/api.js";
import { exporter } from "/js/export.js";
import { bare, bytes, clock, ending, isFailure, time } from "/js/format.js";
import { drawName } from "/js/tables.js";
import { at, drawEndpoint } from "/js/connections.js";
import { on, select, store } from "/js/store.js";

const most = 300; // records that are shown
const drawn = 1000; // ms from one drawing of the list to the next
const kept = new Map(); // records of connections that have ended, by their number and node
const mostKept = 3000;

/** Keeps a record, so that its story can be told. */
export function keep(record) {
  kept.delete(record.id + at(record));
  kept.set(record.id + at(record), record);
  if (kept.size > mostKept) kept.delete(kept.keys().next().value);
}

/**
 * Returns the record of a connection that has ended, if the page has seen it. A proxy that
 * starts again gives numbers again: time, if it is known, says whose.
 */
export function recordOf(id, time, proxy) {
  const record = kept.get(id + at({ proxy_node: proxy }));
  return record && (time === undefined || record.time === time) ? record : undefined;
}

export function recordsView() {
  let stop = null;
  let opens = false;
  let shown = [];
  let lost = 0;
  let missing = 0; // records of before that the proxy does not have
  let number = 0;
  let failed = null;
  let due = false;

  const withOpens = el("input", { type: "checkbox", onchange: () => {
    opens = withOpens.checked;
    restart();
  } });
  const state = el("span", { class: "where", role: "status" });
  const body = el("tbody");
  const note = el("p", { class: "empty" });
  const root = el("div", { class: "records" },
    el("div", { class: "tools" }, el("label", {}, withOpens, " also as they open"), exporter("records", past), state),
    el("div", { class: "tabled" }, el("div", { class: "scroll" }, el("table", { "aria-label": "Records" },
      el("thead", {}, el("tr", {}, ["Ended", "Client", "Service", "Endpoint", "Attempts", "Lasted", "Bytes", "End"].map((h, i) => el("th", { scope: "col", class: i >= 4 && i <= 6 ? "number" : "" }, h)))),
      body)), note));

  function line(r) {
    if (r.lost) {
      lost += r.lost;
    } else {
      r.number = ++number;
      r.at = Date.parse(r.time) + r.duration_us / 1000;
      if (r.end) keep(r);
      shown.unshift(r);
      shown.length = Math.min(shown.length, most);
    }
    if (due) return;
    due = true;
    setTimeout(() => {
      due = false;
      if (!store.paused) draw();
    }, drawn);
  }

  const identity = (r) => r.id + at(r) + " " + r.time;

  /** The records of before, the oldest first, at most so many. */
  async function past(limit, signal) {
    const list = [];
    await lines("past", { filter: store.filter, limit }, signal, (r) => {
      if (r.past) missing = r.past.lost ?? 0;
      else list.push(r);
    });
    return list;
  }

  /** Adds what ended while nobody followed. */
  async function fill(signal) {
    const list = await past(most, signal).catch(() => []); // a proxy without a past
    if (signal.aborted) return;
    const seen = new Set(shown.filter((r) => r.end).map(identity));
    for (const r of list) {
      if (seen.has(identity(r))) continue;
      r.number = ++number;
      r.at = Date.parse(r.time) + r.duration_us / 1000;
      keep(r);
      shown.push(r);
    }
    shown = shown.sort((a, b) => b.at - a.at).slice(0, most);
    draw();
  }

  function make() {
    const cells = [..."12345678"].map((c, i) => el("td", { class: i >= 4 && i <= 6 ? "number" : i <= 1 ? "code" : "" }));
    const row = el("tr", { tabindex: "0", onclick: () => open(row.item), onkeydown: (e) => {
      if (e.key === "Enter") open(row.item);
      if (e.key === "ArrowDown") row.nextElementSibling?.focus();
      if (e.key === "ArrowUp") row.previousElementSibling?.focus();
      if (e.key.startsWith("Arrow")) e.preventDefault();
    } }, cells);
    row.cells_ = cells;
    return row;
  }

  const open = (r) => select({ kind: "connection", id: r.id, seen: r });

  function change(row, r) {
    if (row.item === r) return;
    row.item = r;
    const c = row.cells_;
    text(c[0], clock(r.at, true));
    text(c[1], (r.event === "refused" ? r.client.replace(/:0$/, "") : r.client) + at(r));
    drawName(c[2], r.service ?? r.vip);
    drawEndpoint(c[3], r);
    text(c[4], String(r.attempts));
    attribute(c[4], "data-bad", r.failed_attempts?.length ? "" : null);
    attribute(c[4], "title", r.failed_attempts?.map((f) => (f.pod ? bare(f.pod) : f.endpoint) + " " + f.error).join(", "));
    text(c[5], r.end ? time(r.duration_us) : "");
    text(c[6], r.end ? bytes(r.bytes_from_client + r.bytes_from_endpoint) : "");
    text(c[7], r.end ?? "opened"); // as filters write it
    attribute(c[7], "title", r.end && ending(r.end));
    attribute(c[7], "data-bad", r.end && isFailure(r.end) ? "" : null);
    attribute(c[7], "data-quiet", r.end && !isFailure(r.end) ? "" : null);
  }

  function draw() {
    let said = "";
    if (lost) said += (said ? "; " : "") + lost + " were too fast for this page";
    if (missing) said += (said ? "; " : "") + missing + " of before are missing";
    text(state, said);
    if (!root.isConnected) return;
    keyed(body, shown, (r) => r.number, make, change);
    note.hidden = shown.length > 0;
    text(note, failed ?? "Records appear here as connections end");
  }

  function restart() {
    if (!stop) return;
    stop();
    const control = new AbortController();
    const unfollow = follow("tap", { filter: store.filter, opens: opens || undefined, rate: 200 }, line, (error) => {
      failed = error?.message ?? null;
      if (error) draw();
      else fill(control.signal);
    });
    stop = () => {
      control.abort();
      unfollow();
    };
  }

  on("filter", () => {
    shown = [];
    restart();
    draw();
  });
  draw();
  return {
    root,
    show() {
      stop ??= () => {};
      restart();
      draw();
    },
    hide() {
      stop?.();
      stop = null;
    },
  };
}
