// Numbers for people. All have at most three digits that count.

const minus = "–";

function digits(n) {
  if (n === 0) return "0";
  if (n < 0.1) return n.toFixed(2);
  if (n < 9.95) return n.toFixed(1);
  return Math.round(n).toString();
}

function scaled(n, units, step) {
  let i = 0;
  while (n >= step * 0.9995 && i < units.length - 1) {
    n /= step;
    i++;
  }
  return [digits(n), units[i]];
}

/** A count: 17, 1,204, 12.3 k. */
export function count(n) {
  if (n < 10000) return Math.round(n).toLocaleString("en");
  return scaled(n, ["", " k", " M", " G"], 1000).join("");
}

/** A rate a second without its unit. */
export function rate(n) {
  if (!n || n < 0.005) return "0";
  return scaled(n, ["", " k", " M", " G"], 1000).join("");
}

/** Bytes. */
export function bytes(n) {
  if (n < 0.5) n = 0;
  if (n < 1000) return Math.round(n) + " B";
  return scaled(n, [" B", " kB", " MB", " GB", " TB"], 1000).join("");
}

/** A duration of microseconds. */
export function time(us) {
  if (us === undefined || us === null) return minus;
  if (us < 1000) return us + " µs";
  if (us < 1e6) return digits(us / 1000) + " ms";
  if (us < 60e6) return digits(us / 1e6) + " s";
  const s = Math.round(us / 1e6);
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60) + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
}

/** The time of day. */
export function clock(date, parts = 0) {
  const t = new Date(date);
  const two = (n) => String(n).padStart(2, "0");
  let out = two(t.getHours()) + ":" + two(t.getMinutes()) + ":" + two(t.getSeconds());
  if (parts) out += "." + String(t.getMilliseconds()).padStart(3, "0");
  return out;
}

/** The address of an address and port. */
export function host(place) {
  const at = place.lastIndexOf(":");
  const h = at < 0 ? place : place.slice(0, at);
  return h.startsWith("[") ? h.slice(1, -1) : h;
}

/** The part of a qualified name after its namespace. */
export function bare(name) {
  const at = name.indexOf("/");
  return at < 0 ? name : name.slice(at + 1);
}

/** The namespace of a qualified name. */
export function namespace(name) {
  const at = name.indexOf("/");
  return at < 0 ? "" : name.slice(0, at);
}

const ends = {
  client_fin: "closed by the client",
  endpoint_fin: "closed by the endpoint",
  client_reset: "reset by the client",
  endpoint_reset: "reset by the endpoint",
  client_timeout: "the client stopped answering",
  endpoint_timeout: "the endpoint stopped answering",
  idle: "idle for too long",
  shutdown: "Sluice was stopped",
  connect_failed: "no endpoint answered",
  no_endpoints: "no endpoint can serve",
  limit: "a limit was reached",
  namespace_limit: "the limit of its namespace was reached",
  drained: "the endpoint serves no more, and the time to drain was over",
  no_local_endpoints: "no endpoint on this node, policy Local",
  unknown_port: "no Service has this port",
  unknown_address: "no Service has this address",
  rebalanced: "closed while idle, so that the client uses new endpoints",
  admin: "ended through the admin socket",
  not_forwarded: "rules judge what the kernel forwards, and it did not forward this",
  endpoint_gone: "the endpoint was removed, or serves no more",
};

/** What an end means. */
export const ending = (end) => ends[end] ?? end.replaceAll("_", " ");

const broken = new Set(["connect_failed", "no_endpoints", "endpoint_reset", "endpoint_timeout", "endpoint_abort", "endpoint_comm_lost", "limit", "namespace_limit", "not_forwarded"]);

/** Whether an end is a failure, as the rates count it. */
export const isFailure = (end) => broken.has(end);

/** Compares names, and numbers in them as numbers. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
