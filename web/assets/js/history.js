// The last 15 minutes of rates: from the proxy, which keeps them while somebody asks;
// or, for what a filter selects, from the page itself since it looks.

import { follow, get, poll } from "/js/api.js";

export const span = 15 * 60; // seconds

const numbers = ["open", "opened", "failed", "failed_attempts", "bytes_from_client", "bytes_from_endpoint"];
const worst = ["connect_p50_us", "connect_p99_us", "first_byte_p50_us", "first_byte_p99_us"]; // of several series the largest is shown

/** Points by time. */
class Points {
  all = new Map();

  /** Adds a series' numbers to the point at a time. */
  add(ms, get) {
    const p = this.all.get(ms) ?? { ms };
    for (const n of numbers) p[n] = (p[n] ?? 0) + (get(n) ?? 0);
    for (const n of worst) p[n] = Math.max(p[n] ?? 0, get(n) ?? 0);
    this.all.set(ms, p);
  }

  /** Returns the points of the last 15 minutes, oldest first, each with its age in seconds. */
  list() {
    const sorted = [...this.all.values()].sort((a, b) => a.ms - b.ms);
    const last = sorted.at(-1)?.ms ?? 0;
    for (const p of sorted) {
      p.age = (last - p.ms) / 1000;
      if (p.age > span) this.all.delete(p.ms);
    }
    return sorted.filter((p) => p.age <= span);
  }
}

/** Follows what the proxy keeps of some series; changed is called when there is more. */
export function kept(queries, changed) {
  let points = new Points();
  let began = "";
  let since = 0;
  const asking = poll(5000, async (signal) => {
    try {
      let next = since;
      for (const query of queries) {
        const answer = await get("history", { ...query, since: since || undefined, limit: 1000 }, signal);
        if (answer.began !== began) {
          if (began) {
            points = new Points();
            since = next = 0;
          }
          began = answer.began;
        }
        answer.times.forEach((t, i) => {
          if (t <= since) return;
          if (answer.series.length === 0) points.add(t * 1000, () => 0);
          for (const s of answer.series) points.add(t * 1000, (name) => s[name]?.[i]);
          next = Math.max(next, t);
        });
      }
      since = next;
      changed();
    } catch {
      // The rates say that the proxy does not answer.
    }
  });
  return { list: () => points.list(), stop: asking.stop };
}

const step = 5000; // ms

/** Keeps the frames of rates that it is given. */
export function own(changed) {
  const points = new Points();
  let sums = null;
  let parts = 0;
  let slot = 0;
  return {
    list: () => points.list(),
    stop() {},
    add(f) {
      const now = Math.floor(Date.parse(f.time) / step);
      if (sums && now !== slot) {
        points.add(slot * step, (name) => (worst.includes(name) || name === "open" ? sums[name] : sums[name] / parts));
        sums = null;
        changed();
      }
      slot = now;
      if (!sums) {
        sums = {};
        parts = 0;
      }
      parts++;
      for (const n of numbers) sums[n] = n === "open" ? f.total.open : (sums[n] ?? 0) + f.total[n];
      for (const n of worst) sums[n] = Math.max(sums[n] ?? 0, f.total[n] ?? 0);
    },
  };
}

/** Measures what a filter selects, from now on. */
export function measured(filter, changed) {
  const kept = own(changed);
  return { ...kept, stop: follow("rates", { by: "node", limit: 1, filter }, kept.add) };
}
