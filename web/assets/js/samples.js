// Bytes of connections over time, as far as the page has looked at them.

const mostConnections = 400;
const mostSamples = 240;
const all = new Map(); // the one looked at last is last

/** What tells connections apart: a proxy that starts again gives numbers again. */
const keyOf = (c) => c.id + " " + c.time + (c.proxy_node ?? "");

/** Keeps the bytes that a connection has moved until now. */
export function note(c) {
  const list = all.get(keyOf(c)) ?? [];
  all.delete(keyOf(c));
  all.set(keyOf(c), list);
  const sample = { us: c.duration_us, from: c.bytes_from_client, to: c.bytes_from_endpoint };
  const last = list[list.length - 1];
  if (last && last.us >= sample.us) return;
  list.push(sample);
  if (list.length > mostSamples) {
    // Every second one goes, so that the beginning stays.
    const kept = list.filter((_, i) => i % 2 === 0 || i === list.length - 1);
    list.splice(0, list.length, ...kept);
  }
  if (all.size > mostConnections) all.delete(all.keys().next().value);
}

/** Returns the samples of a connection, oldest first. */
export const samples = (c) => all.get(keyOf(c)) ?? [];
