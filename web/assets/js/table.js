// Tables: sorted by a click on a column, in pages, with rows that the keyboard moves over.

import { el, text, attribute, keyed } from "/js/dom.js";
import { byName, count } from "/js/format.js";

/**
 * Returns a table. Columns have a key, a label, perhaps number, sort (how a row
 * compares), and either value (its text) or draw (which fills the cell). With query, the
 * order and the page are asked for elsewhere.
 */
export function table({ label, columns, key, open, sort, page = 50, query, empty }) {
  let rows = [];
  let matched = 0;
  let first = 0;
  let by = sort;
  let held = false; // the order stays while the pointer or the focus is inside
  let order = new Map();
  let selected = null;

  const heads = columns.map((c) => {
    const button = el("button", { type: "button", onclick: () => choose(c) }, c.label);
    return el("th", { scope: "col", class: (c.number ? "number " : "") + (c.class ?? "").replace("code", "") }, c.sort === null ? c.label : button);
  });
  const body = el("tbody");
  const note = el("p", { class: "empty", hidden: true });
  const where = el("span", { class: "where" });
  const back = el("button", { type: "button", class: "quiet", onclick: () => turn(-1) }, "← Back");
  const next = el("button", { type: "button", class: "quiet", onclick: () => turn(1) }, "Next →");
  const pages = el("div", { class: "pages" }, back, where, next);
  const root = el("div", { class: "tabled" },
    el("div", { class: "scroll" }, el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, heads)), body)), note, pages);

  body.addEventListener("pointerenter", () => (held = true));
  body.addEventListener("pointerleave", () => (held = false));
  body.addEventListener("keydown", (e) => {
    const row = e.target.closest("tr");
    if (!row) return;
    const to = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Home: body.firstElementChild, End: body.lastElementChild }[e.key];
    if (to) {
      e.preventDefault();
      to.focus();
    } else if (e.key === "Enter" || e.key === " ") {
      e.preventDefault();
      open(row.item);
    }
  });

  function choose(c) {
    const down = by.key === c.key ? !by.down : Boolean(c.number);
    by = { key: c.key, down };
    first = 0;
    order = new Map();
    heading();
    if (query) query(by, first, page);
    else draw();
  }

  function heading() {
    columns.forEach((c, i) => attribute(heads[i], "aria-sort", c.key === by.key ? (by.down ? "descending" : "ascending") : null));
  }

  function turn(by1) {
    first = Math.max(0, first + by1 * page);
    if (query) query(by, first, page);
    else draw();
    root.querySelector(".scroll").scrollTop = 0;
  }

  function make(item) {
    const cells = columns.map((c) => el("td", { class: (c.number ? "number " : "") + (c.class ?? ""), "data-label": c.label }));
    const row = el("tr", { tabindex: "-1", onclick: () => open(row.item) }, cells);
    row.cells_ = cells;
    return row;
  }

  function change(row, item) {
    row.item = item;
    attribute(row, "aria-selected", selected !== null && key(item) === selected ? "true" : null);
    columns.forEach((c, i) => (c.draw ? c.draw(row.cells_[i], item) : text(row.cells_[i], c.value(item))));
  }

  function compare(column) {
    const sign = by.down ? -1 : 1;
    return (a, b) => {
      const x = column.sort(a), y = column.sort(b);
      const n = typeof x === "string" ? byName(x, y) : x - y;
      return n !== 0 ? sign * n : key(a) < key(b) ? -1 : 1;
    };
  }

  function draw() {
    let shown = rows;
    if (!query) {
      const column = columns.find((c) => c.key === by.key);
      matched = rows.length;
      if ((held || body.contains(document.activeElement)) && order.size) {
        shown = [...rows].sort((a, b) => (order.get(key(a)) ?? 1e9) - (order.get(key(b)) ?? 1e9));
      } else {
        shown = [...rows].sort(compare(column));
        order = new Map(shown.map((r, i) => [key(r), i]));
      }
      first = Math.min(first, Math.floor(Math.max(0, matched - 1) / page) * page);
      shown = shown.slice(first, first + page);
    }
    keyed(body, shown, key, make, change);
    const active = body.contains(document.activeElement) ? document.activeElement.closest("tr") : body.firstElementChild;
    for (const row of body.children) attribute(row, "tabindex", row === active ? "0" : "-1");
    note.hidden = shown.length > 0;
    text(note, empty());
    const to = first + shown.length;
    text(where, matched === 0 ? "" : `${count(first + 1)} to ${count(to)} of ${count(matched)}`);
    back.disabled = first === 0;
    next.disabled = to >= matched || (query && to >= 10000);
    pages.hidden = matched <= page && first === 0;
  }

  heading();
  return {
    root,
    /** Shows rows; of a query, those of the page, and how many match in all. */
    set(list, all = list.length) {
      if (query && list.length === 0 && all > 0 && first > 0) { // fewer match than before
        first = Math.floor((all - 1) / page) * page;
        query(by, first, page);
        return;
      }
      rows = list;
      matched = all;
      draw();
    },
    select(k) {
      selected = k;
      draw();
    },
    /** What is asked for: the order, the first row and how many. */
    asked: () => ({ by, first, page }),
    first() {
      first = 0;
    },
  };
}
