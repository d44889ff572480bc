// The numbers of now, with what they were.

import { el, text, attribute } from "/js/dom.js";
import { spark } from "/js/chart.js";
import { bytes, count, rate, time } from "/js/format.js";
import { on, store } from "/js/store.js";

const all = [
  { label: "Open", least: 1, cls: "flow", get: (p) => p.open, show: (t) => [count(t.open), ""] },
  { label: "New", least: 1, cls: "flow", get: (p) => p.opened, show: (t) => [rate(t.opened), "/s"] },
  { label: "Failed", least: 1, cls: "fail", get: (p) => p.failed, bad: (t) => t.failed > 0.02,
    show: (t) => [rate(t.failed), "/s"], more: (t) => (t.failed_attempts > 0.02 ? rate(t.failed_attempts) + "/s retried" : "") },
  { label: "Connect, 99 %", least: 1000, cls: "flow", get: (p) => p.connect_p99_us, show: (t) => (t.connect_p99_us ? time(t.connect_p99_us).split(" ") : ["–", ""]) },
  { label: "To clients", least: 1000, cls: "flow", get: (p) => p.bytes_from_endpoint, show: (t) => bytes(t.bytes_from_endpoint).split(" "), per: "/s" },
  { label: "From clients", least: 1000, cls: "flow", get: (p) => p.bytes_from_client, show: (t) => bytes(t.bytes_from_client).split(" "), per: "/s" },
];

export function strip(root) {
  const cells = all.map((c) => {
    const value = el("span", { class: "value" }), unit = el("span", { class: "unit" }), more = el("span", { class: "more" });
    const line = spark(c.get, c.least, c.cls);
    const cell = el("div", { class: "cell" }, el("span", { class: "label" }, c.label, more), el("span", { class: "number" }, value, unit), line.root);
    root.append(cell);
    return { c, cell, value, unit, more, line };
  });
  const draw = () => {
    const points = store.past.list();
    for (const { c, cell, value, unit, more, line } of cells) {
      const [v, u] = store.total ? c.show(store.total) : ["–", ""];
      text(value, v);
      text(unit, store.total && v !== "–" ? (u ?? "") + (c.per ?? "") : "");
      text(more, (store.total && c.more?.(store.total)) || "");
      attribute(cell, "data-bad", store.total && c.bad?.(store.total) ? "" : null);
      line.draw(points);
    }
  };
  on("frame", draw);
  on("filter", draw);
  on("past", draw);
  draw();
}
