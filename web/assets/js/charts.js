// The charts of a selection.

import { el, text } from "/js/dom.js";
import { chart } from "/js/chart.js";
import { span } from "/js/history.js";
import { count, rate, bytes, clock, time } from "/js/format.js";

/** Returns the charts of what opens and is open, of failures, times and bytes. */
export function charts() {
  const perSecond = (n) => rate(n) + "/s";
  const all = [
    chart({ title: "New connections", least: 1, show: perSecond, lines: [{ name: "", class: "flow", get: (p) => p.opened }] }),
    chart({ title: "Open connections", least: 10, show: (n) => count(n), lines: [{ name: "", class: "flow", get: (p) => p.open }] }),
    chart({ title: "Failures", least: 1, show: perSecond, lines: [
      { name: "connections", class: "fail", get: (p) => p.failed },
      { name: "attempts", class: "warn", get: (p) => p.failed_attempts },
    ] }),
    chart({ title: "Connect time", least: 1000, show: (v) => (v ? time(Math.round(v)) : "–"), lines: [
      { name: "50 %", class: "flow", get: (p) => p.connect_p50_us },
      { name: "99 %", class: "second", get: (p) => p.connect_p99_us },
    ] }),
    chart({ title: "First byte", least: 1000, show: (v) => (v ? time(Math.round(v)) : "–"), lines: [
      { name: "50 %", class: "flow", get: (p) => p.first_byte_p50_us },
      { name: "99 %", class: "second", get: (p) => p.first_byte_p99_us },
    ] }),
    chart({ title: "Bytes", least: 1000, show: (n) => bytes(n) + "/s", lines: [
      { name: "to clients", class: "flow", get: (p) => p.bytes_from_endpoint },
      { name: "from clients", class: "second", get: (p) => p.bytes_from_client },
    ] }),
  ];
  const since = el("p", { class: "hint since" });
  return {
    root: el("div", { class: "charts" }, all.map((c) => c.root), since),
    draw(points) {
      for (const c of all) c.draw(points);
      const first = points[0];
      text(since, !first ? "The first numbers come within some seconds." : first.age < span - 30 ? "Measured since " + clock(first.ms) + ", when somebody began to look." : "");
    },
  };
}
