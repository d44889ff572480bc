// What the page knows: the configuration, the rates of now, and those of before.

import { askNode, follow, get, poll, Refused, rest } from "/js/api.js";
import { host } from "/js/format.js";
import { kept, own } from "/js/history.js";

const listeners = new Map();

/** Calls f when something has changed: frame, past, services, status, filter, selection, clients, trouble, asked, paused. */
export function on(event, f) {
  if (!listeners.has(event)) listeners.set(event, new Set());
  listeners.get(event).add(f);
  return () => listeners.get(event).delete(f);
}

export function emit(event, value) {
  for (const f of [...(listeners.get(event) ?? [])]) f(value);
}

export const store = {
  node: "", // whose proxy is asked; all nodes together without one
  filter: "",
  filterError: null,
  /** What is selected: null, or {kind, ...}. */
  selection: null,
  question: null, // what was asked of Explain last
  services: [], // of api.Services, those that the filter selects
  partial: false, // the filter has terms that only connections have
  servicesKnown: false,
  status: null,
  paused: false, // nothing is asked, and nothing changes
  trouble: null, // why the proxy does not answer
  total: null, // rates of all
  edges: new Map(), // rates by service and endpoint
  byService: new Map(),
  byEndpoint: new Map(),
  clients: new Map(), // rates by client and service
  past: { list: () => [], stop() {} }, // the last 15 minutes of what the filter selects
};

export const serviceKey = (service, protocol) => service + " " + protocol;
export const edgeKey = (service, protocol, endpoint) => service + " " + protocol + " " + endpoint;

const smooth = ["opened", "ended", "failed", "broken", "failed_attempts", "saved_attempts", "bytes_from_client", "bytes_from_endpoint"];
const medians = ["connect_p50_us", "first_byte_p50_us", "duration_p50_us"];
const tails = ["connect_p99_us", "first_byte_p99_us", "duration_p99_us"];
const share = 0.35; // of a new value in what is shown

/** Failures of an endpoint or a Service: broken connections, and attempts that no other endpoint made good. */
export const blamed = (r) => (r ? r.broken + r.failed_attempts - r.saved_attempts : 0);

/**
 * Brings a map of rates up to date; values fade in and out over some seconds. All keys fade
 * alike, so that they add up to what their sum fades to, however short each one is there:
 * only in the map's first frame they begin at their value.
 */
export function blend(map, rows, keyOf) {
  const seen = new Set();
  const first = !map.begun;
  map.begun = true;
  for (const row of rows) {
    const key = keyOf(row);
    seen.add(key);
    const old = map.get(key);
    const failing = row.failed_attempts + row.broken > 0;
    if (!old) {
      const fresh = { ...row, key, last: Date.now(), lastFailed: failing ? Date.now() : 0 };
      if (!first) for (const name of smooth) fresh[name] *= share;
      map.set(key, fresh);
      continue;
    }
    if (failing) old.lastFailed = Date.now();
    for (const name of smooth) old[name] += (row[name] - old[name]) * share;
    old.open = row.open;
    old.connecting = row.connecting;
    for (const name of medians) old[name] = row[name] ?? old[name];
    for (const name of tails) old[name] = row[name] ?? old[name];
    if (row.pod) old.pod = row.pod;
    if (row.opened > 0 || row.open > 0 || row.failed_attempts > 0) old.last = Date.now();
  }
  for (const [key, old] of map) {
    if (seen.has(key)) continue;
    let alive = false;
    for (const name of smooth) {
      old[name] *= 1 - share;
      if (old[name] < 0.001) old[name] = 0;
      alive ||= old[name] > 0;
    }
    old.open = old.connecting = 0;
    if (!alive && Date.now() - old.last > 15 * 60 * 1000) map.delete(key);
  }
}

/** Adds the rates of rows by a key. */
function gather(rows, keyOf) {
  const out = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    if (!key) continue;
    const sum = out.get(key);
    if (!sum) {
      out.set(key, { ...row });
      continue;
    }
    for (const name of smooth) sum[name] += row[name];
    sum.open += row.open;
    sum.connecting += row.connecting;
    const weight = sum.opened > 0 ? row.opened / sum.opened : 0;
    for (const name of medians) if (row[name]) sum[name] = Math.round((sum[name] ?? row[name]) * (1 - weight) + row[name] * weight);
    for (const name of tails) sum[name] = Math.max(sum[name] ?? 0, row[name] ?? 0) || undefined;
  }
  return out;
}

function frame(f) {
  const total = new Map(store.total ? [["", store.total]] : []);
  total.begun = Boolean(store.total);
  blend(total, [f.total], () => "");
  store.total = total.get("");
  const byService = gather(f.rows, (r) => r.service && serviceKey(r.service, r.protocol));
  const byEndpoint = gather(f.rows, (r) => r.endpoint);
  blend(store.edges, f.rows.filter((r) => r.service), (r) => edgeKey(r.service, r.protocol, r.endpoint ?? ""));
  blend(store.byService, byService.values(), (r) => serviceKey(r.service, r.protocol));
  blend(store.byEndpoint, byEndpoint.values(), (r) => r.endpoint);
  mine?.add(f);
  emit("frame");
}

const troubles = new Map(); // by what was asked

/** Keeps why something was not answered, or that it was. */
function answered(what, error) {
  if (error instanceof Refused && error.status === 400) return; // the filter box says it
  if (error) troubles.set(what, error.message);
  else troubles.delete(what);
  const text = [...troubles.values()][0] ?? null;
  if (text === store.trouble) return;
  store.trouble = text;
  emit("trouble");
}

const mostRows = 5000;
let stopRates = () => {};
let mine = null; // the history that the page keeps itself
let services = null;
let statuses = null;

/** Asks for the Services that the filter selects. */
async function askServices(signal) {
  try {
    const list = [];
    const params = { filter: store.filter, limit: 1000 };
    let answer;
    do {
      answer = await get("services", { ...params, offset: list.length }, signal);
      list.push(...answer.services);
    } while (list.length < answer.matched && answer.services.length > 0 && list.length + 1000 <= 10000);
    store.services = list;
    store.partial = Boolean(answer.partial);
    store.servicesKnown = true;
    answered("services", null);
    emit("services");
  } catch (error) {
    if (!signal.aborted) answered("services", error);
  }
}

async function askStatus(signal) {
  try {
    const several = together();
    store.status = await get("status", {}, signal);
    if (together() !== several) {
      again(); // no node keeps the history of all
      emit("selection");
    }
    answered("status", null);
    emit("status");
  } catch (error) {
    if (signal.aborted) return;
    if (store.node && error instanceof Refused && error.status === 400) return setNode(""); // a page of one node knows no others
    answered("status", error);
  }
}

/** Begins to ask. */
export function begin() {
  statuses = poll(5000, askStatus);
  services = poll(4000, askServices);
  again();
}

/** Pauses the page, or has it go on. */
export function pause(on) {
  if (store.paused === on) return;
  store.paused = on;
  rest(on);
  emit("paused");
}

function again() {
  pause(false); // what is asked for now shall be seen
  stopRates();
  store.edges = new Map();
  store.byService = new Map();
  store.byEndpoint = new Map();
  store.clients = new Map();
  store.total = null;
  store.past.stop();
  mine = store.filter || together() ? own(() => emit("past")) : null; // a proxy keeps it without a filter
  store.past = mine ?? kept([{ by: "total" }], () => emit("past"));
  stopRates = follow("rates", { by: "service,endpoint", sort: "name", quiet: false, limit: mostRows, filter: store.filter }, frame, (error) => answered("rates", error));
}

/** Whether the page is of several nodes, and all of them are asked together. */
export const together = () => Boolean(store.status?.nodes) && !store.node;

/** Chooses the node whose proxy is asked; none for all together. */
export function setNode(name) {
  if (name === store.node) return;
  store.node = name;
  askNode(name);
  again();
  services?.now();
  statuses?.now();
  emit("filter"); // all that is shown is asked for again
  emit("selection");
}

/** Sets the filter, if the proxy understands it. Throws what is wrong. */
export async function setFilter(text, signal) {
  if (text === store.filter) return;
  if (text) await get("connections", { filter: text, limit: 0 }, signal);
  store.filter = text;
  again();
  services?.now();
  emit("filter");
}

let stopClients = () => {};
let clientUsers = 0;

function followClients() {
  stopClients();
  store.clients = new Map();
  if (clientUsers === 0) return;
  stopClients = follow("rates", { by: "client,service", quiet: false, limit: 1000, filter: store.filter }, (f) => {
    blend(store.clients, f.rows.filter((r) => r.client && r.service), (r) => r.client + " " + serviceKey(r.service, r.protocol));
    emit("clients");
  });
}

on("filter", followClients);

/** Follows the rates of clients until the returned function is called. */
export function watchClients() {
  if (++clientUsers === 1) followClients();
  return () => {
    if (--clientUsers === 0) followClients();
  };
}

/** Selects something, or null. */
export function select(selection) {
  store.selection = selection;
  emit("selection");
}

/** Whether an endpoint is drained. */
export function drained(e) {
  const list = store.status?.drained ?? [];
  return list.some((d) => (!d.pod || d.pod === e.pod) && (d.endpoint === e.endpoint || d.endpoint === host(e.endpoint)));
}

/** The Services that have an endpoint. */
export function servicesOf(endpoint) {
  return store.services.filter((s) => s.endpoints.some((e) => e.endpoint === endpoint));
}

/** The endpoints of a pod, each once. */
export function endpointsOf(pod) {
  const all = new Map();
  for (const s of store.services) for (const e of s.endpoints) if (e.pod === pod) all.set(e.endpoint, e);
  return [...all.values()];
}
