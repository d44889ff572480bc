// Charts of the last 15 minutes: one line or two on a common scale.

import { el, svg, text, attribute } from "/js/dom.js";
import { clock } from "/js/format.js";
import { span } from "/js/history.js";

const W = 320, H = 64; // the drawing's own units; it is stretched to its place

/** Returns a scale's end that people read easily, at least as large as n. */
function nice(n, least) {
  if (n <= least) return least;
  const power = 10 ** Math.floor(Math.log10(n));
  for (const m of [1, 1.5, 2, 3, 5, 7.5, 10]) if (n <= m * power) return m * power;
  return n;
}

/** Returns how many seconds a chart shows: few while there are only few to show. */
const shownOf = (points) => [60, 300].find((s) => (points[0]?.age ?? 0) <= s) ?? span;

const x = (age, shown) => W - (age / shown) * W;

function path(points, get, top, shown) {
  let out = "";
  for (const p of points) out += (out ? "L" : "M") + x(p.age, shown).toFixed(1) + " " + (H - 1 - (Math.min(get(p), top) / top) * (H - 4)).toFixed(1);
  return out;
}

/** Whether there is something to draw: a failure line at zero says nothing. */
const worthwhile = (points, line) => !["fail", "warn"].includes(line.class) || points.some((p) => line.get(p) > 0);

/**
 * Returns a chart. Lines have a name, a class, and how to read them from a point; show
 * writes a value; least is the smallest end of the scale.
 */
export function chart({ title, lines, show, least }) {
  const now = lines.map((l) => el("span", { class: "value " + l.class }));
  const top = el("span", { class: "scale" });
  const when = el("span", { class: "when" });
  const paths = lines.map((l) => svg("path", { class: "line " + l.class, "vector-effect": "non-scaling-stroke" }));
  const area = svg("path", { class: "area " + lines[0].class });
  const cursor = svg("line", { class: "cursor", y1: 0, y2: H, "vector-effect": "non-scaling-stroke" });
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    [1, 2].map((i) => svg("line", { class: "grid", x1: (W / 3) * i, x2: (W / 3) * i, y1: 0, y2: H, "vector-effect": "non-scaling-stroke" })),
    svg("line", { class: "base", x1: 0, x2: W, y1: H - 0.5, y2: H - 0.5, "vector-effect": "non-scaling-stroke" }),
    area, paths, cursor);
  const plot = el("div", { class: "plot", role: "img" }, drawing, top, when);
  const ticks = [3, 2, 1, 0].map(() => el("span"));
  const root = el("figure", { class: "chart" },
    el("figcaption", {}, el("span", { class: "title" }, title),
      el("span", { class: "values" }, lines.map((l, i) => el("span", { class: "legend" }, l.name && el("span", { class: "name " + l.class }, l.name), now[i])))),
    plot,
    el("div", { class: "axis", "aria-hidden": "true" }, ticks));

  let points = [];
  let shown = span;
  let at = null; // the age under the pointer
  const say = () => {
    let p = points[points.length - 1];
    if (at !== null && points.length) p = points.reduce((a, b) => (Math.abs(b.age - at) < Math.abs(a.age - at) ? b : a));
    lines.forEach((l, i) => text(now[i], p ? show(l.get(p)) : "–"));
    text(when, at !== null && p ? clock(p.ms) : "");
    attribute(cursor, "visibility", at !== null && p ? "visible" : "hidden");
    if (p) {
      attribute(cursor, "x1", x(p.age, shown).toFixed(1));
      attribute(cursor, "x2", x(p.age, shown).toFixed(1));
    }
  };
  plot.addEventListener("pointermove", (e) => {
    const box = plot.getBoundingClientRect();
    at = (1 - (e.clientX - box.left) / box.width) * shown;
    say();
  });
  plot.addEventListener("pointerleave", () => {
    at = null;
    say();
  });

  return {
    root,
    draw(all) {
      points = all;
      shown = shownOf(all);
      ticks.forEach((t, i) => text(t, i === 3 ? "now" : shown < 120 ? shown - (shown / 3) * i + (i ? "" : " s ago") : Math.round((shown - (shown / 3) * i) / 6) / 10 + (i ? "" : " min ago")));
      const most = nice(Math.max(0, ...all.flatMap((p) => lines.map((l) => l.get(p)))), least);
      lines.forEach((l, i) => attribute(paths[i], "d", worthwhile(all, l) ? path(all, l.get, most, shown) : ""));
      attribute(area, "d", all.length ? path(all, lines[0].get, most, shown) + `L${W} ${H}L${x(all[0].age, shown).toFixed(1)} ${H}Z` : "");
      text(top, show(most));
      const last = all[all.length - 1];
      attribute(plot, "aria-label", title + ", the last " + (shown < 120 ? shown + " seconds" : shown / 60 + " minutes") + ": now " + (last ? lines.map((l) => (l.name + " " + show(l.get(last))).trim()).join(", ") : "nothing") + "; at most " + show(most));
      say();
    },
  };
}

/** Returns a small line without axes. */
export function spark(get, least, cls) {
  const line = svg("path", { class: "line " + cls, "vector-effect": "non-scaling-stroke" });
  const root = svg("svg", { class: "spark", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  return {
    root,
    draw(points) {
      attribute(line, "d", worthwhile(points, { get, class: cls }) ? path(points, get, Math.max(least, ...points.map(get)), shownOf(points)) : "");
    },
  };
}
